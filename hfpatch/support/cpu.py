"""How this process computes on the CPU: the library of its matrix products, the memory that it keeps, and its cores.

torch computes ``F.linear`` in fp32 on the CPU with MKL, which on AMD processors runs at half of oneDNN's rate or less;
on Intel processors both run alike. So `choose` times both on this machine, and takes oneDNN where it gains at least a
tenth. Of a model in bf16 the choice is between products in bf16 (AVX-512 BF16 or AMX instructions, twice fp32's rate or
more) and, on a processor without them or where they gain nothing, products of the same values in fp32, rounded to bf16.

`hfpatch.nn.matmul` computes the products.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.errors import HfpatchError

MatmulLibrary: TypeAlias = Literal["mkl", "onednn", "bf16", "fp32"]
"""For a model in fp32 the library, MKL or oneDNN; for one in bf16 the dtype that its products are computed in."""
Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Returns x W^T of x (rows, in) and W (out, in)."""
Shapes: TypeAlias = tuple[tuple[int, int], ...]
"""(out, in) of weights."""

VARIABLE = "HFPATCH_MATMUL"
_OF_FP32, _OF_BF16 = ("mkl", "onednn"), ("bf16", "fp32")
_GAIN = 1.1  # below that, oneDNN is not worth another rounding
_ROWS = 256  # tokens of a timed product, at most
_MOST_OPERATIONS = 2e8  # of one timed product: some milliseconds
_REPEATS = 6  # of which the fastest counts
_RESOLUTION = 1e-6  # of a clock that can time a product: that of threads has 16 ms on Windows
_SECONDS = 0.06  # for one shape; past that, two times of each product must do
_KEPT = 256 << 20
_LARGEST_KEPT = 32 << 20  # of glibc's own threshold; larger blocks are mapped one by one, and are given back
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")

_active: ContextVar[MatmulLibrary] = ContextVar("hfpatch_matmul", default="mkl")
_pinned: ContextVar[MatmulLibrary | None] = ContextVar("hfpatch_matmul_pinned", default=None)


def choose(shapes: Shapes, onednn: Product, *, half: bool) -> MatmulLibrary:
    """Return the library that is faster for a model's products on this machine.

    The environment variable ``HFPATCH_MATMUL`` decides by hand: ``mkl`` or ``onednn`` for models in fp32, ``bf16`` or
    ``fp32`` for those in bf16, else and by default ``auto``, which times the products.

    Args:
        shapes: of the weights that decide; none where all are too small for a gain.
        onednn: oneDNN's product in fp32.
        half: whether the model is in bf16.

    Raises:
        HfpatchError: if the variable has another value, or asks for oneDNN where torch is built without it.
    """
    asked = os.environ.get(VARIABLE, "auto")
    if asked != "auto":
        check_library(asked, VARIABLE)
    if (pinned := _pinned.get()) is not None:
        return pinned
    if asked in (_OF_BF16 if half else _OF_FP32):
        return cast("MatmulLibrary", asked)
    if half and not multiplies_bf16():
        return "fp32"
    threads = torch.get_num_threads()
    gain = measured_gain(shapes, threads, onednn) if shapes and has_onednn() else 1.0
    if not half:
        return "onednn" if gain >= _GAIN else "mkl"
    worth = not shapes or measured_gain(shapes, threads, F.linear, torch.bfloat16) >= _GAIN * max(1.0, gain)
    return "bf16" if worth else "fp32"


@lru_cache(maxsize=64)
def measured_gain(shapes: Shapes, threads: int, product: Product, dtype: torch.dtype = torch.float32) -> float:
    """Return how many times faster a product is than ``F.linear`` in fp32, summed over weights of these shapes.

    Timed are the forward product and the gradient by the input, in less than 0.5 s; the answer is kept for the process.
    The smallest of some interleaved times counts, as whatever else runs on the machine only adds to them; of one thread
    the time on the processor, which leaves out the time of others. torch must have that many threads already.
    """
    ways = ((F.linear, torch.float32), (product, dtype))
    best = [0.0, 0.0]
    exact = time.get_clock_info("thread_time").resolution <= _RESOLUTION
    clock = time.thread_time if threads == 1 and exact else time.perf_counter
    with torch.no_grad():
        for out, inputs in shapes:
            rows = max(16, min(_ROWS, int(_MOST_OPERATIONS / (2 * out * inputs))))
            sizes = ((rows, inputs), (rows, out), (out, inputs))
            operands = [[torch.ones(size, dtype=kind) for size in sizes] for _, kind in ways]
            seconds: list[list[float]] = [[], []]
            start = time.perf_counter()
            for repeat in range(_REPEATS):
                for (multiply, _), (x, g, weight), taken in zip(ways, operands, seconds, strict=True):
                    begin = clock()
                    multiply(x, weight)
                    multiply(g, weight.t())
                    taken.append(clock() - begin)
                if repeat and time.perf_counter() - start > _SECONDS:
                    break
            best = [total + min(taken) for total, taken in zip(best, seconds, strict=True)]
    return best[0] / best[1]


@contextmanager
def pinned_library(library: MatmulLibrary | None) -> Iterator[None]:
    """Let `choose` return one library for as long as this lasts, as all parts of a run must share it; None pins none.

    Raises:
        HfpatchError: if this build of torch does not have it, or ``HFPATCH_MATMUL`` asks for the other one.
    """
    asked = os.environ.get(VARIABLE, "auto")
    same_kind = library in _OF_FP32 if asked in _OF_FP32 else library in _OF_BF16
    if library is not None and asked not in ("auto", library) and same_kind:
        raise HfpatchError(f"{VARIABLE} is {asked!r}, but the run was begun with {library}; unset it or start again")
    token = _pinned.set(library if library is None else check_library(library, "the run"))
    try:
        yield
    finally:
        _pinned.reset(token)


@contextmanager
def active(library: MatmulLibrary) -> Iterator[None]:
    """Let products in this thread use a library for as long as this lasts."""
    token = _active.set(library)
    try:
        yield
    finally:
        _active.reset(token)


def active_library() -> MatmulLibrary:
    """Return the library that products use at this moment."""
    return _active.get()


def check_library(asked: str, where: str) -> MatmulLibrary:
    """Return the library that ``where`` asks for.

    Raises:
        HfpatchError: if it is unknown, or missing in this build of torch.
    """
    if asked not in (*_OF_FP32, *_OF_BF16):
        raise HfpatchError(f"{where} is {asked!r}; give mkl or onednn, for a model in bfloat16 bf16 or fp32, or auto")
    if asked == "onednn" and not has_onednn():
        raise HfpatchError(f"{where} asks for onednn, which this build of torch does not have; use mkl or auto")
    return cast("MatmulLibrary", asked)


def has_onednn() -> bool:
    """Return whether this build of torch has oneDNN's product with a plain weight."""
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiplies_bf16() -> bool:
    """Return whether this processor has instructions that multiply bf16, AVX-512 BF16 or AMX, and torch uses them."""
    onednn, cpu = cast("Any", torch.backends.mkldnn), cast("Any", torch.cpu)
    asked = (getattr(cpu, f"_is_{kind}_supported", None) for kind in ("avx512_bf16", "amx_tile"))
    return bool(onednn.is_available()) and any(has() for has in asked if has is not None)


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep up to 256 MiB that were freed for the next tensors, until this process ends.

    A forward pass frees what the next layer allocates again. By default glibc gives the end of its heap back to the
    system as soon as some hundred KiB there are free, and the system clears each page that it hands out again. In
    short batches on the CPU that was a tenth of the time.

    Returns:
        Whether it does: glibc alone knows these thresholds, and one that a variable such as ``MALLOC_TRIM_THRESHOLD_``
        sets stays as it is.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  which other C libraries lack
    except (AttributeError, OSError, TypeError):
        return False
    if any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(library.mallopt(_TRIM_THRESHOLD, _KEPT))
