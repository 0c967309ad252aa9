"""Matrix products on the CPU through whichever library is faster here: torch's own choice (MKL) or oneDNN.

torch computes ``F.linear`` in fp32 on the CPU with MKL, which on AMD processors runs at half of oneDNN's rate or less;
on Intel processors both run alike. `fast_matmul` measures that for a model on this machine and, where oneDNN gains at
least a tenth, lets the model's linear layers use it, forward and backward. Nothing else changes: values agree to
rounding, weights are neither copied nor reordered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hfpatch.errors import HfpatchError

MatmulLibrary: TypeAlias = Literal["mkl", "onednn"]

VARIABLE = "HFPATCH_MATMUL"
_GAIN = 1.1  # below that, oneDNN is not worth another rounding
_ROWS = 256
_MOST_OPERATIONS = 2e8  # of one timed product: some milliseconds
_LARGEST = 2048  # what is timed of a wider weight
_SMALLEST = 1 << 18  # weights with fewer elements take no time worth saving, and little to measure it by
_REPEATS = 6
_RESOLUTION = 1e-6  # of a clock that can time a product: that of threads has 16 ms on Windows
_SECONDS = 0.06  # for one shape; past that, two times of each library must do
_PLAIN = (Tensor, nn.Parameter)

_active: ContextVar[MatmulLibrary] = ContextVar("hfpatch_matmul", default="mkl")
_pinned: ContextVar[MatmulLibrary | None] = ContextVar("hfpatch_matmul_pinned", default=None)


@contextmanager
def fast_matmul(model: nn.Module, *, library: MatmulLibrary | None = None) -> Iterator[MatmulLibrary | None]:
    """Compute the fp32 products of a model's linear layers on the CPU with the faster library, as long as this lasts.

    Only plain ``nn.Linear`` and transformers' ``Conv1D`` modules on the CPU are changed. Modules whose ``forward`` was
    replaced, quantised, sharded, compiled or offloaded modules, other dtypes and autocast compute as before; hooks on a
    module act as before.

    Args:
        model: the model; whether it has adapters does not matter.
        library: the library to use; None asks `choose_library`.

    Yields:
        The library that the products use, or None for a model that is not on the CPU.

    Raises:
        HfpatchError: if ``library`` or the variable ``HFPATCH_MATMUL`` asks for a library that is unknown or missing.
    """
    chosen = _checked(library, "library") if library is not None else choose_library(model)
    plain = [module for module in model.modules() if _is_plain(module)] if chosen == "onednn" else []
    changed = [module for module in plain if "forward" not in vars(module)]  # within another such block
    for module in changed:
        module.forward = partial(_forward, module)
    token = _active.set(chosen or "mkl")
    try:
        yield chosen
    finally:
        _active.reset(token)
        for module in changed:
            del module.forward


@contextmanager
def pinned_library(library: MatmulLibrary | None) -> Iterator[None]:
    """Let `choose_library` return one library for as long as this lasts, as all parts of a run must share it.

    Args:
        library: the library; None pins nothing.

    Raises:
        HfpatchError: if this build of torch does not have it, or ``HFPATCH_MATMUL`` asks for the other one.
    """
    asked = os.environ.get(VARIABLE, "auto")
    if library is not None and asked not in ("auto", library):
        raise HfpatchError(
            f"{VARIABLE} is {asked!r}, but the run was begun with {library}; unset it or start a new run"
        )
    token = _pinned.set(library if library is None else _checked(library, "the run"))
    try:
        yield
    finally:
        _pinned.reset(token)


def choose_library(model: nn.Module) -> MatmulLibrary | None:
    """Return the library that is faster for a model's products on this machine; None for a model not on the CPU.

    The environment variable ``HFPATCH_MATMUL`` (``mkl``, ``onednn`` or ``auto``, the default) decides by hand. ``auto``
    times the forward product and the gradient by the input of the model's most expensive shapes, which takes less than
    0.3 s; the answer is kept for the process.

    Raises:
        HfpatchError: if the variable has another value, or asks for oneDNN where torch is built without it.
    """
    asked = _pinned.get() or os.environ.get(VARIABLE, "auto")
    if not _on_cpu(model):
        return None
    if asked != "auto":
        return _checked(asked, VARIABLE)
    shapes = _expensive_shapes(model)
    return "onednn" if shapes and available() and measured_gain(shapes, torch.get_num_threads()) >= _GAIN else "mkl"


def available() -> bool:
    """Return whether this build of torch has oneDNN's product with a plain weight."""
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def active_library() -> MatmulLibrary:
    """Return the library that `linear` uses at this moment."""
    return _active.get()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` by the library that is active, as ``F.linear`` does.

    Args:
        x: (..., in).
        weight: (out, in), with any strides.
        bias: (out,) or None.
    """
    if _active.get() == "onednn" and _takes(x, weight, bias):
        return _product(x, weight, bias)
    return F.linear(x, weight, bias)


@lru_cache(maxsize=64)
def measured_gain(shapes: tuple[tuple[int, int], ...], threads: int) -> float:
    """Return how many times faster oneDNN is than MKL over products with weights of these shapes (out, in).

    The smallest of some interleaved times counts, as whatever else runs on the machine only adds to them; of one thread
    the time on the processor, which leaves out what others take.

    Args:
        shapes: of the weights.
        threads: of torch, which it must have already.
    """
    best = {"mkl": 0.0, "onednn": 0.0}
    exact = time.get_clock_info("thread_time").resolution <= _RESOLUTION
    clock = time.thread_time if threads == 1 and exact else time.perf_counter
    with torch.no_grad():
        for out, inputs in shapes:
            rows = max(16, min(_ROWS, int(_MOST_OPERATIONS / (2 * out * inputs))))
            x, g, weight = torch.ones(rows, inputs), torch.ones(rows, out), torch.ones(out, inputs)
            seconds: dict[str, list[float]] = {name: [] for name in best}
            start = time.perf_counter()
            for repeat in range(_REPEATS):
                for name, product in (("mkl", F.linear), ("onednn", _onednn)):
                    begin = clock()
                    product(x, weight)
                    product(g, weight.t())
                    seconds[name].append(clock() - begin)
                if repeat and time.perf_counter() - start > _SECONDS:
                    break
            for name, taken in seconds.items():
                best[name] += min(taken)
    return best["mkl"] / best["onednn"]


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` with oneDNN, and its gradients; frozen tensors get none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x = ctx.needs_input_grad[1]  # only the gradient by the weight reads x
        ctx.save_for_backward(x if needs_x else None, weight if ctx.needs_input_grad[0] else None)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = outer[0]
        rows = g.reshape(-1, g.shape[-1])
        by_x = _onednn(g, weight.t()) if weight is not None else None
        by_weight = _onednn(rows.t(), x.reshape(-1, x.shape[-1]).t()) if x is not None else None
        return by_x, by_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dense = None if bias is None else bias.contiguous()  # with a strided bias the operator gives wrong values
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()  # with other strides the operator takes hundreds of times as long
    return cast("Tensor", torch.ops.mkldnn._linear_pointwise(x, weight, dense, "none", [], ""))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in (x, weight, bias)):
        return cast("Tensor", _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    return _onednn(x, weight, bias)


def _takes(*values: Tensor | None) -> bool:
    """Return whether oneDNN may take these: plain dense fp32 tensors on the CPU, outside autocast and compilers."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return all(
        value is None
        or (
            type(value) in _PLAIN
            and value.dtype == torch.float32
            and value.device.type == "cpu"
            and value.layout == torch.strided
            and value.numel() > 0
        )
        for value in values
    )


def _forward(module: Any, x: Tensor) -> Tensor:
    """Forward pass of a linear module."""
    transposed = not isinstance(module, nn.Linear)  # Conv1D has its weight as (in, out)
    weight = module.weight.t() if transposed else module.weight
    if _takes(x, weight, module.bias):
        return _product(x, weight, module.bias)
    return cast("Tensor", type(module).forward(module, x))


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module's ``forward`` was replaced by anything but `fast_matmul`."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _forward


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    known = kind is nn.Linear or (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")
    return known and not has_own_forward(module) and _takes(cast("Tensor", module.weight))


def _on_cpu(model: nn.Module) -> bool:
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.device.type == "cpu"


def _expensive_shapes(model: nn.Module, most: int = 3) -> tuple[tuple[int, int], ...]:
    """Return the shapes (out, in) that the model's plain linear modules spend the most operations on."""
    operations: dict[tuple[int, int], int] = {}
    for module in model.modules():
        if _is_plain(module):
            weight = cast("Tensor", module.weight)
            out, inputs = weight.shape if isinstance(module, nn.Linear) else weight.shape[::-1]
            if weight.numel() >= _SMALLEST:
                shape = (min(out, _LARGEST), min(inputs, _LARGEST))
                operations[shape] = operations.get(shape, 0) + weight.numel()
    return tuple(sorted(operations, key=lambda shape: -operations[shape])[:most])


def _checked(asked: str, where: str) -> MatmulLibrary:
    if asked not in ("mkl", "onednn"):
        raise HfpatchError(f"{where} is {asked!r}; give mkl, onednn or auto")
    if asked == "onednn" and not available():
        raise HfpatchError(f"{where} asks for onednn, which this build of torch does not have; use mkl or auto")
    return cast("MatmulLibrary", asked)
