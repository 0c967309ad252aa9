"""What the forward pass keeps for the gradient: results that are cheap to compute again are not kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hfpatch.support.cpu import release_freed_memory
from hfpatch.training.hardware import resident_memory_bytes

_OF_ONE = frozenset({"add", "div", "float", "gelu", "layer_norm", "neg", "pow", "rms_norm", "silu", "sub", "to"})
_CHEAP = _OF_ONE | {"mul"}
"""Operators, by torch's names, that take far less time than a matrix product; those of one tensor, and products."""
_RECIPE = "_hfpatch_recipe"
_GROWTH = 256 << 20  # of the resident memory; with 64 MiB a step of SmolLM2-135M takes 8 % longer, by page faults
FEWEST_VALUES = 1 << 20
"""Hidden values of all layers in a forward pass, from which on recomputation pays: some 64 MiB are kept for them."""


@dataclass(frozen=True)
class _Result:
    """A tensor that can be computed again: an operator and its inputs, which may be such tensors themselves."""

    operator: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    device: str
    autocast: torch.dtype | None
    version: int

    def compute(self) -> Tensor:
        inputs = [_computed(value) for value in self.inputs]
        options = {name: _computed(value) for name, value in self.options.items()}
        with torch.no_grad(), torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            return self.operator(*inputs, **options)

    def roots(self) -> Iterator[Tensor]:
        for value in (*self.inputs, *self.options.values()):
            if isinstance(value, _View):
                yield from value.result.roots()
            elif isinstance(value, _Root):
                yield value.tensor


@dataclass(frozen=True)
class _View:
    """A view of such a tensor, which has the same strides when it is computed again."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def compute(self) -> Tensor:
        return self.result.compute().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Root:
    """A tensor that is in memory."""

    tensor: Tensor
    version: int

    def compute(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a tensor that the gradient needs was changed in place")
        return self.tensor


class CheapRecomputation(TorchFunctionMode):
    """Within a forward pass, keep for the gradient only what takes time to compute.

    Autograd keeps what an operator's gradient reads, such as g, silu(g) and u of silu(g) ⊙ u. Here the results of
    activations, norms, casts and products of elements are computed again in the backward pass, by the same operators
    from the same values, where these are kept anyway or take fewer bytes. So gradients have the same bits. Results of
    matrix products, attention, dropout and sums of tensors are kept.

    On CPUs the C library would also hold what is freed between kept tensors, half as much again, as a freed block
    rarely fits another aligned one. It is given back to the system whenever the process has grown by 256 MiB; memory
    that was freed before the forward pass is used again first.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = frozenset(_storage_id(parameter) for parameter in model.parameters())
        self._results: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by storage
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._unseen = self._resident = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CheapRecomputation:
        self._resident = resident_memory_bytes()
        self._stack.enter_context(saved_tensors_hooks(self._pack, _computed))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types for it
        self._stack.close()
        self._kept.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; of a cheap one note how its result came about."""
        options = kwargs or {}
        result = func(*args, **options)
        name = getattr(func, "__name__", "")
        if name in _CHEAP and type(result) is Tensor and result.requires_grad:
            tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
            of_one = sum(value.requires_grad for value in tensors) == 1
            is_new = all(_storage_id(value) != _storage_id(result) for value in tensors)
            if is_new and (of_one or name == "mul"):
                inputs = tuple(map(self._input, args)), {key: self._input(value) for key, value in options.items()}
                device = result.device.type
                autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
                setattr(result, _RECIPE, _Result(func, *inputs, device, autocast, result._version))
                self._results[_storage_id(result)] = result
        return result

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._find(value) or _Root(value.detach(), value._version)

    def _find(self, tensor: Tensor) -> _View | None:
        """Return how to compute a tensor again, if it is a view of a cheap result."""
        whole = self._results.get(_storage_id(tensor))
        if whole is None or whole._version != getattr(whole, _RECIPE).version:
            return None
        return _View(getattr(whole, _RECIPE), tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if self._is_kept(tensor):
            return tensor
        view = self._find(tensor)
        if view is not None:
            new = {_storage_id(root): root for root in view.result.roots() if not self._is_kept(root)}
            if sum(value.untyped_storage().nbytes() for value in new.values()) < tensor.untyped_storage().nbytes():
                for value in new.values():
                    self._keep(value)
                return view
        self._keep(tensor)
        return tensor

    def _is_kept(self, tensor: Tensor) -> bool:
        storage = _storage_id(tensor)
        return storage in self._kept or storage in self._parameters

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage
        self._results.pop(storage._cdata, None)
        self._unseen += storage.nbytes()
        if self._unseen > _GROWTH and tensor.device.type == "cpu":
            self._unseen = 0
            if resident_memory_bytes() > self._resident + _GROWTH:
                release_freed_memory()
                self._resident = resident_memory_bytes()


def pays(model: PreTrainedModel, tokens: int) -> bool:
    """Whether a forward pass of so many tokens keeps enough that `CheapRecomputation` is worth its calls of Python."""
    config = model.config.get_text_config()
    return tokens * getattr(config, "hidden_size", 0) * getattr(config, "num_hidden_layers", 0) >= FEWEST_VALUES


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, (_View, _Root)) else value


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
