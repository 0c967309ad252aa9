"""Matrix products on the CPU by whatever is faster here: MKL or oneDNN in fp32, and bf16 where the weights are bf16.

torch computes ``F.linear`` in fp32 on the CPU with MKL, which on AMD processors runs at half of oneDNN's rate or less;
on Intel processors both run alike. `fast_matmul` measures that for a model on this machine and, where oneDNN gains at
least a tenth, lets the model's linear layers use it, forward and backward. Nothing else changes: values agree to
rounding, weights are neither copied nor reordered.

Of a model in bf16 the choice is between products in bf16 (AVX-512 BF16 or AMX instructions, twice fp32's rate or more)
and, on a processor without them or where they gain nothing, products of the same values in fp32, rounded to bf16.
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

MatmulLibrary: TypeAlias = Literal["mkl", "onednn", "bf16", "fp32"]
"""For a model in fp32 the library, MKL or oneDNN; for one in bf16 what its products are computed in."""

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
_OF_FP32, _OF_BF16 = ("mkl", "onednn"), ("bf16", "fp32")
_WITH_ONEDNN = ("onednn", *_OF_BF16)  # of the fp32 products in a bf16 model it is never the slower one

_active: ContextVar[MatmulLibrary] = ContextVar("hfpatch_matmul", default="mkl")
_pinned: ContextVar[MatmulLibrary | None] = ContextVar("hfpatch_matmul_pinned", default=None)


@contextmanager
def fast_matmul(model: nn.Module, *, library: MatmulLibrary | None = None) -> Iterator[MatmulLibrary | None]:
    """Compute the products of a model's linear layers on the CPU by the faster way, as long as this lasts.

    Only plain ``nn.Linear`` and transformers' ``Conv1D`` modules on the CPU are changed. Modules whose ``forward`` was
    replaced, quantised, sharded, compiled or offloaded modules, fp16 and autocast compute as before; hooks on a module
    act as before.

    Args:
        model: the model; whether it has adapters does not matter.
        library: the library to use; None asks `choose_library`.

    Yields:
        The library that the products use, or None for a model that is not on the CPU.

    Raises:
        HfpatchError: if ``library`` or the variable ``HFPATCH_MATMUL`` asks for a library that is unknown or missing.
    """
    chosen = _checked(library, "library") if library is not None else choose_library(model)
    dtypes = _changed_by(chosen)
    plain = [module for module in model.modules() if _is_plain(module, dtypes)] if dtypes else []
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
    same_kind = library in _OF_FP32 if asked in _OF_FP32 else library in _OF_BF16
    if library is not None and asked not in ("auto", library) and same_kind:
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

    The environment variable ``HFPATCH_MATMUL`` decides by hand: ``mkl`` or ``onednn`` for models in fp32, ``bf16`` or
    ``fp32`` for those in bf16, else and by default ``auto``. That times the forward product and the gradient by the
    input of the model's most expensive shapes, which takes less than 0.5 s; the answer is kept for the process.

    Raises:
        HfpatchError: if the variable has another value, or asks for oneDNN where torch is built without it.
    """
    asked = os.environ.get(VARIABLE, "auto")
    if not _on_cpu(model):
        return None
    if asked != "auto":
        _checked(asked, VARIABLE)
    if (pinned := _pinned.get()) is not None:
        return pinned
    half = any(_is_plain(module, (torch.bfloat16,)) for module in model.modules())
    if asked in (_OF_BF16 if half else _OF_FP32):
        return cast("MatmulLibrary", asked)
    shapes, threads = _expensive_shapes(model), torch.get_num_threads()
    gain = measured_gain(shapes, threads) if shapes and available() else 1.0
    if not half:
        return "onednn" if gain >= _GAIN else "mkl"
    if not multiplies_bf16():
        return "fp32"
    return "bf16" if not shapes or measured_gain(shapes, threads, "bf16") >= _GAIN * max(1.0, gain) else "fp32"


def multiplies_bf16() -> bool:
    """Return whether this processor has instructions that multiply bf16, AVX-512 BF16 or AMX, and torch uses them."""
    onednn, cpu = cast("Any", torch.backends.mkldnn), cast("Any", torch.cpu)
    asked = (getattr(cpu, f"_is_{kind}_supported", None) for kind in ("avx512_bf16", "amx_tile"))
    return bool(onednn.is_available()) and any(has() for has in asked if has is not None)


def available() -> bool:
    """Return whether this build of torch has oneDNN's product with a plain weight."""
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def active_library() -> MatmulLibrary:
    """Return the library that `linear` uses at this moment."""
    return _active.get()


def is_stock(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` computes a product at this moment as torch does."""
    return not _takes(_changed_by(_active.get()), x, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` by the library that is active, as ``F.linear`` does.

    Args:
        x: (..., in).
        weight: (out, in), with any strides.
        bias: (out,) or None.
    """
    if _takes(_changed_by(_active.get()), x, weight, bias):
        return _product(x, weight, bias)
    return F.linear(x, weight, bias)


@lru_cache(maxsize=64)
def measured_gain(shapes: tuple[tuple[int, int], ...], threads: int, library: MatmulLibrary = "onednn") -> float:
    """Return how many times faster products are than MKL's in fp32, over weights of these shapes (out, in).

    The smallest of some interleaved times counts, as whatever else runs on the machine only adds to them; of one thread
    the time on the processor, which leaves out what others take.

    Args:
        shapes: of the weights.
        threads: of torch, which it must have already.
        library: ``onednn`` in fp32, or ``bf16``.
    """
    best: dict[str, float] = {"mkl": 0.0, library: 0.0}
    dtypes = {"mkl": torch.float32, library: torch.bfloat16 if library == "bf16" else torch.float32}
    products = {"mkl": F.linear, library: F.linear if library == "bf16" else _onednn}
    exact = time.get_clock_info("thread_time").resolution <= _RESOLUTION
    clock = time.thread_time if threads == 1 and exact else time.perf_counter
    with torch.no_grad():
        for out, inputs in shapes:
            rows = max(16, min(_ROWS, int(_MOST_OPERATIONS / (2 * out * inputs))))
            sizes = ((rows, inputs), (rows, out), (out, inputs))
            given = {name: [torch.ones(size, dtype=dtype) for size in sizes] for name, dtype in dtypes.items()}
            seconds: dict[str, list[float]] = {name: [] for name in best}
            start = time.perf_counter()
            for repeat in range(_REPEATS):
                for name, product in products.items():
                    x, g, weight = given[name]
                    begin = clock()
                    product(x, weight)
                    product(g, weight.t())
                    seconds[name].append(clock() - begin)
                if repeat and time.perf_counter() - start > _SECONDS:
                    break
            best = {each: best[each] + min(taken) for each, taken in seconds.items()}
    return best["mkl"] / best[library]


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
    """Return the product in fp32, by oneDNN where torch has it; of bf16 values rounded to bf16."""
    if x.dtype == torch.bfloat16:
        return _product(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if not available():
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in (x, weight, bias)):
        return cast("Tensor", _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    return _onednn(x, weight, bias)


def _changed_by(library: MatmulLibrary | None) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the products that are computed otherwise than ``F.linear`` does."""
    fp32 = (torch.float32,) if library in _WITH_ONEDNN and available() else ()
    return (*fp32, torch.bfloat16) if library == "fp32" else fp32


def _takes(dtypes: tuple[torch.dtype, ...], *values: Tensor | None) -> bool:
    """Return whether these are plain dense CPU tensors of one of these dtypes, outside autocast and compilers."""
    if not dtypes or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    first = values[0]
    return first is not None and all(
        value is None
        or (
            type(value) in _PLAIN
            and value.dtype in dtypes
            and value.dtype == first.dtype
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
    if _takes(_changed_by(_active.get()), x, weight, module.bias):
        return _product(x, weight, module.bias)
    return cast("Tensor", type(module).forward(module, x))


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module's ``forward`` was replaced by anything but `fast_matmul`."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _forward


def _is_plain(module: nn.Module, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> bool:
    kind = type(module)
    known = kind is nn.Linear or (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")
    return known and not has_own_forward(module) and _takes(dtypes, cast("Tensor", module.weight))


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
    if asked not in (*_OF_FP32, *_OF_BF16):
        raise HfpatchError(f"{where} is {asked!r}; give mkl or onednn, for a model in bfloat16 bf16 or fp32, or auto")
    if asked == "onednn" and not available():
        raise HfpatchError(f"{where} asks for onednn, which this build of torch does not have; use mkl or auto")
    return cast("MatmulLibrary", asked)
