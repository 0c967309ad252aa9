"""A GPU that is simulated on the CPU: its tensors have real values, and say that they are on ``cuda:0``.

Within ``simulated_device()`` each storage is either on the CPU or on the simulated device, and an operation that mixes
the two raises, as CUDA does, and so does a draw on the device by a generator of the CPU. As values are real, code that
reads them (probes, ``tolist``, ``nonzero``) runs on. What CUDA lets mix may mix: scalars of the CPU, indices of the CPU
into a tensor of the device, and copies.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_COPIES = ("aten::copy_", "aten::_foreach_copy_")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_MOVES = ("to", "cpu", "cuda")


@contextmanager
def simulated_device():
    """Let ``cuda`` be a simulated device for as long as this lasts."""
    engine = torch.autograd._engine_run_backward
    with _Operations() as operations, _Calls(operations) as calls:

        def run(*args, **kwargs):
            with calls:  # torch has left the mode, which custom functions and checkpointing need
                return engine(*args, **kwargs)

        with patch.object(torch.autograd, "_engine_run_backward", run):
            yield


class _Operations(TorchDispatchMode):
    """Follows where each storage is, through every operation, those of the backward pass too.

    Attributes:
        default: where an operation without inputs has its result.
    """

    def __init__(self):
        super().__init__()
        self.on_device: dict[int, StorageWeakRef] = {}
        self.default = CPU

    def device_of(self, tensor):
        reference = self.on_device.get(tensor.untyped_storage()._cdata)
        return CPU if reference is None or reference.expired() else CUDA  # expired: the address is used again

    def put(self, tensor, device):
        storage = tensor.untyped_storage()
        self.on_device.pop(storage._cdata, None)
        if device == CUDA:
            self.on_device[storage._cdata] = StorageWeakRef(storage)

    @contextmanager
    def call(self, default):
        before, self.default = self.default, default
        try:
            yield
        finally:
            self.default = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, inputs = func._schema.name, _tensors((args, kwargs))
        devices = [self.device_of(tensor) for tensor in inputs]
        if name not in _COPIES:
            alike = [i for i, tensor in enumerate(inputs) if tensor.dim() or devices[i] == CUDA]
            if name in _INDEXED and devices[0] == CUDA:
                alike = [0, *(i for i in alike if i > len(_tensors(args[1])))]  # without the indices
            if len({devices[i] for i in alike}) > 1:
                described = [(device.type, tuple(tensor.shape)) for device, tensor in zip(devices, inputs, strict=True)]
                raise RuntimeError(f"Expected all tensors to be on the same device; {name} got {described}")
        result = func(*args, **(kwargs or {}))
        stored = {tensor.untyped_storage()._cdata for tensor in inputs}
        device = self.default if not inputs else CUDA if CUDA in devices else CPU
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in stored:
                self.put(tensor, device)
        return result


class _Calls(TorchFunctionMode):
    """Answers for the device in calls of torch's API: ``x.device``, ``device="cuda"``, ``x.to("cuda")``."""

    def __init__(self, operations):
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, operations = dict(kwargs or {}), self.operations
        name, inputs = getattr(func, "__name__", ""), _tensors((args, kwargs))
        devices = [operations.device_of(tensor) for tensor in inputs]
        if func == torch.Tensor.device.__get__:
            return devices[0]
        if func == torch.Tensor.is_cuda.__get__:
            return devices[0] == CUDA
        if name in ("numpy", "__array__") and CUDA in devices:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        wanted = _asked(name, args, kwargs, devices)
        if wanted == CUDA and (generator := kwargs.get("generator")) is not None and generator.device == CPU:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if wanted is None:
            with operations.call(CUDA if CUDA in devices else CPU):
                return func(*args, **kwargs)
        if name == "cuda":
            func, args, kwargs = torch.Tensor.to, (args[0],), {"copy": True}
        else:
            args = tuple(CPU if isinstance(argument, str | torch.device) else argument for argument in args)
            kwargs = {key: CPU if key == "device" else value for key, value in kwargs.items()}
        with operations.call(wanted):
            result = func(*args, **kwargs)
            if name in _MOVES and devices[0] == wanted:
                return result
            if name in _MOVES and result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                result = result.clone()
            operations.put(result, wanted)
            return result


def _asked(name, args, kwargs, devices):
    """Return the device that a call asks for, or None."""
    if name in ("cpu", "cuda"):
        return torch.device(name, 0) if name == "cuda" else CPU
    if name == "to" and len(devices) == 2:
        return devices[1]
    given = kwargs.get("device")
    if name == "to":
        given = next((argument for argument in args if isinstance(argument, str | torch.device)), given)
    if given is None or torch.device(given).type == "meta":
        return None
    return CUDA if torch.device(given).type == "cuda" else CPU


def _tensors(value):
    return [tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)]
