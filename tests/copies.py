"""Copies of models, several times as fast as ``copy.deepcopy`` makes them."""

import io
import pickle

import torch


class _Pickler(pickle.Pickler):
    """Writes everything but tensors, which it keeps in ``tensors``, each once."""

    def __init__(self, file):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors, self._numbers = [], {}

    def persistent_id(self, value):
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    """Reads it with a copy of each tensor; what was shared stays shared."""

    def __init__(self, file, tensors):
        super().__init__(file)
        self._tensors, self._copies = tensors, {}

    def persistent_load(self, number):
        if number not in self._copies:
            tensor = self._tensors[number]
            copy = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
            self._copies[number] = copy
        return self._copies[number]


class Template:
    """A model to copy, whose tensors are leaves without gradients and views of nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(model)
        self._written, self._tensors = file.getvalue(), pickler.tensors

    def copy(self) -> torch.nn.Module:
        return _Unpickler(io.BytesIO(self._written), self._tensors).load()
