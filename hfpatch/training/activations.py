"""What the forward pass keeps for the gradient: results that are cheap to compute again are not kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_OF_ONE = frozenset({"add", "div", "float", "gelu", "layer_norm", "neg", "pow", "rms_norm", "silu", "sub", "to"})
_CHEAP = _OF_ONE | {"mul"}
"""Operators, by torch's names, that take far less time than a matrix product; those of one tensor, and products."""
_BUFFER = 64 << 20
"""Bytes, many times what one tensor takes: the end of a buffer stays unused where the next tensor does not fit."""
_ALIGNMENT = 64  # as torch's
FEWEST_VALUES = 1 << 20
"""Hidden values of all layers in a forward pass, from which on recomputation pays: some 64 MiB are kept for them."""


@dataclass
class _Root:
    """A tensor in memory; ``kept`` once a result that the gradient needs is computed from it."""

    tensor: Tensor
    version: int
    kept: bool = False


@dataclass(frozen=True)
class _Result:
    """A tensor that can be computed again: an operator and its inputs, which may be views of such tensors."""

    operator: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    device: str
    autocast: torch.dtype | None
    dtype: torch.dtype
    version: int

    def compute(self) -> Tensor:
        inputs = [_computed(value) for value in self.inputs]
        options = {name: _computed(value) for name, value in self.options.items()}
        with torch.no_grad(), torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            return self.operator(*inputs, **options)

    def roots(self) -> Iterator[_Root]:
        for value in (*self.inputs, *self.options.values()):
            if isinstance(value, _View):
                yield from value.result.roots()
            elif isinstance(value, _Root):
                yield value


@dataclass(frozen=True)
class _View:
    """A view of such a tensor, which has the same strides when it is computed again."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class CheapRecomputation(TorchFunctionMode):
    """Within a forward pass, keep for the gradient only what takes time to compute.

    Autograd keeps what an operator's gradient reads, such as g, silu(g) and u of silu(g) ⊙ u. Here the results of
    activations, norms, casts and products of elements are computed again in the backward pass, by the same operators
    from the same values, where these are kept anyway or take fewer bytes. So gradients have the same bits. Results of
    matrix products, attention, dropout and sums of tensors are kept; autocast's copies of frozen weights are not.

    What is kept is copied to buffers of 64 MiB. Between kept tensors the C library would hold what is freed, as much
    again, since a freed block rarely fits another aligned one; and a page that is new to the process takes several
    times as long as a copy of it. A buffer is used again by the next forward pass, when nothing in it is needed. So
    the peak is lower, and what is kept may be changed in place afterwards.

    Attributes:
        kept_bytes: what forward passes have kept so far, in all.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.kept_bytes = 0
        self._of_model = {value.untyped_storage() for value in (*model.parameters(), *model.buffers())}
        self._results: WeakKeyDictionary[UntypedStorage, _Result] = WeakKeyDictionary()
        self._kept: WeakKeyDictionary[UntypedStorage, tuple[int, Tensor, int]] = WeakKeyDictionary()
        self._buffer, self._used, self._free = torch.empty(0, dtype=torch.uint8), 0, list[Tensor]()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CheapRecomputation:
        self._stack.enter_context(saved_tensors_hooks(self._pack, _computed))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types for it
        self._stack.close()
        self._kept.clear()
        self._buffer, self._used = torch.empty(0, dtype=torch.uint8), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; of a cheap one note how its result came about."""
        options = kwargs or {}
        if func is F.linear:
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | options
            if torch.is_autocast_enabled(named["input"].device.type):
                args, options = (), {**named, "weight": self._cast(named["weight"])}
        result = func(*args, **options)
        name = getattr(func, "__name__", "")
        if name in _CHEAP and type(result) is Tensor and result.requires_grad:
            tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
            of_one = sum(value.requires_grad for value in tensors) == 1
            storage = result.untyped_storage()
            is_new = all(value.untyped_storage() is not storage for value in tensors)
            if is_new and (of_one or name == "mul"):
                self._note(result, func, args, options)
        return result

    def _cast(self, weight: Tensor) -> Tensor:
        """Cast a frozen weight as autocast would, so that the gradient can do it again."""
        dtype = torch.get_autocast_dtype(weight.device.type)
        if type(weight) is not nn.Parameter or weight.requires_grad or weight.dtype != torch.float32:
            return weight
        cast = weight.to(dtype)
        self._note(cast, Tensor.to, (weight, dtype), {})
        return cast

    def _note(self, result: Tensor, operator: Callable[..., Tensor], args: Any, options: dict[str, Any]) -> None:
        inputs = tuple(map(self._input, args)), {key: self._input(value) for key, value in options.items()}
        device = result.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        how = _Result(operator, *inputs, device, autocast, result.dtype, result._version)
        self._results[result.untyped_storage()] = how

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._find(value) or _Root(value.detach(), value._version)

    def _find(self, tensor: Tensor) -> _View | None:
        """Return how to compute a tensor again, if it is a view of a cheap result and not kept already."""
        result = self._results.get(tensor.untyped_storage())
        if result is None or (tensor._version, tensor.dtype) != (result.version, result.dtype):
            return None
        if self._is_kept(tensor) or _is_lazy(tensor):
            return None
        return _View(result, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if (view := self._find(tensor)) is not None:
            roots = [root for root in view.result.roots() if not root.kept]
            new = {root.tensor.untyped_storage() for root in roots if not self._is_kept(root.tensor)}
            unchanged = all(root.tensor._version == root.version for root in roots)
            if unchanged and sum(storage.nbytes() for storage in new) < tensor.untyped_storage().nbytes():
                for root in roots:
                    root.tensor, root.kept = self._keep(root.tensor), True
                return view
        return self._keep(tensor)

    def _is_kept(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage in self._of_model or self._kept.get(storage, (None,))[0] == tensor._version

    def _keep(self, tensor: Tensor) -> Tensor:
        """Return the same tensor in a buffer, with all of its storage; the model's tensors stay where they are."""
        storage = tensor.untyped_storage()
        if storage in self._of_model or _is_lazy(tensor):
            return tensor
        if not self._is_kept(tensor):
            size = storage.nbytes() + -storage.nbytes() % _ALIGNMENT
            if self._used + size > len(self._buffer):
                self._begin_buffer(size)
            self._kept[storage] = (tensor._version, self._buffer, self._used)
            self._buffer[self._used :][: storage.nbytes()].copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            self._used += size
            self.kept_bytes += storage.nbytes()
        _, buffer, start = self._kept[storage]
        offset = start // tensor.element_size() + int(tensor.storage_offset())
        return buffer.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), offset)

    def _begin_buffer(self, size: int) -> None:
        is_large = size > _BUFFER
        memory = self._free.pop() if self._free and not is_large else torch.empty(max(size, _BUFFER), dtype=torch.uint8)
        self._buffer, self._used = torch.from_numpy(memory.numpy()), 0
        if not is_large:
            finalize(self._buffer.untyped_storage(), self._free.append, memory)


def pays(model: PreTrainedModel, tokens: int) -> bool:
    """Whether a forward pass of so many tokens keeps enough that `CheapRecomputation` is worth its calls of Python."""
    config = model.config.get_text_config()
    return tokens * getattr(config, "hidden_size", 0) * getattr(config, "num_hidden_layers", 0) >= FEWEST_VALUES


def _computed(value: Any) -> Any:
    if isinstance(value, _View):
        return value.result.compute().as_strided(value.size, value.stride, value.offset)
    return value.tensor if isinstance(value, _Root) else value


def _is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor is a view that conjugates or negates what is in memory, which its strides do not say."""
    return tensor.is_conj() or tensor.is_neg()
