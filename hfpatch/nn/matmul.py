"""Matrix products on the CPU by the library that is active: MKL or oneDNN in fp32, and bf16 where the weights are bf16.

Values agree to rounding; weights are neither copied nor reordered. `hfpatch.support.cpu` chooses the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hfpatch.support import cpu
from hfpatch.support.modes import replaced

_LARGEST = 2048  # wider weights are timed at this width
_SMALLEST = 1 << 18  # weights with fewer elements take no time worth saving, and little to measure it by
_PLAIN = (Tensor, nn.Parameter)
_WITH_ONEDNN = ("onednn", "bf16", "fp32")  # of the fp32 products in a bf16 model it is never the slower one


@contextmanager
def fast_matmul(model: nn.Module, *, library: cpu.MatmulLibrary | None = None) -> Iterator[cpu.MatmulLibrary | None]:
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
    chosen = cpu.check_library(library, "library") if library is not None else choose_library(model)
    dtypes = _changed_by(chosen)
    plain = [module for module in model.modules() if _is_plain(module, dtypes)] if dtypes else []
    changed = [module for module in plain if "forward" not in vars(module)]  # within another such block
    with ExitStack() as stack:
        for module in changed:
            stack.enter_context(replaced(module, forward=partial(_forward, module)))
        stack.enter_context(cpu.active(chosen or "mkl"))
        yield chosen


def choose_library(model: nn.Module) -> cpu.MatmulLibrary | None:
    """Return the library that `hfpatch.support.cpu.choose` finds for a model; None for a model not on the CPU."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cpu":
        return None
    half = any(_is_plain(module, (torch.bfloat16,)) for module in model.modules())

    # The three shapes (out, in) of plain linear modules that take the most operations
    operations: dict[tuple[int, int], int] = {}
    for module in filter(_is_plain, model.modules()):
        weight = cast("Tensor", module.weight)
        out, inputs = weight.shape if isinstance(module, nn.Linear) else weight.shape[::-1]
        if weight.numel() >= _SMALLEST:
            shape = (min(out, _LARGEST), min(inputs, _LARGEST))
            operations[shape] = operations.get(shape, 0) + weight.numel()
    shapes = tuple(sorted(operations, key=lambda shape: -operations[shape])[:3])
    return cpu.choose(shapes, _onednn, half=half)


def is_stock(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` computes a product at this moment as torch does."""
    return not _takes(_changed_by(cpu.active_library()), x, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` by the library that is active, as ``F.linear`` does.

    Args:
        x: (..., in).
        weight: (out, in), with any strides.
        bias: (out,) or None.
    """
    if _takes(_changed_by(cpu.active_library()), x, weight, bias):
        return _product(x, weight, bias)
    return F.linear(x, weight, bias)


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
    if not cpu.has_onednn():
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in (x, weight, bias)):
        return cast("Tensor", _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]  # torch has no type for it
    return _onednn(x, weight, bias)


def _changed_by(library: cpu.MatmulLibrary | None) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the products that differ from those of ``F.linear``."""
    fp32 = (torch.float32,) if library in _WITH_ONEDNN and cpu.has_onednn() else ()
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
    if _takes(_changed_by(cpu.active_library()), x, weight, module.bias):
        return _product(x, weight, module.bias)
    return cast("Tensor", type(module).forward(module, x))


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module's ``forward`` was replaced by anything but `fast_matmul`."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _forward


def _is_plain(module: nn.Module, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> bool:
    kind = type(module)
    is_linear = kind is nn.Linear or (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")
    return is_linear and not has_own_forward(module) and _takes(dtypes, cast("Tensor", module.weight))
