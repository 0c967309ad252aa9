"""The last block at scored positions alone, where the rest of its output is not read.

After the last attention each position is computed by itself: the output projection and the MLP of the last block can
skip all positions that are not scored. They run unchanged, on fewer rows; skipped positions are filled with zeros. That
is most of a block, a sixth of a model with six blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer.head import BodyAndHead, Parts
from hfpatch.sites import base_model, survey

Modules = tuple[nn.Module, ...]


def trimmable(model: Any, parts: Parts) -> Modules:
    """Return the modules of the last block that may skip positions, if a trial finds that exact (`try_padding`).

    Args:
        model: a causal language model, with adapters or without.
        parts: the model in two steps.
    """
    if not isinstance(parts, BodyAndHead):
        return ()
    try:
        return _candidates(model)
    except (HfpatchError, AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError):
        return ()


@contextmanager
def only_at(modules: Sequence[nn.Module], rows: Tensor, nodes: Tensor, tokens: Tensor) -> Iterator[None]:
    """Let modules compute only some positions of a batch inside the ``with`` block.

    Args:
        modules: each takes and gives tensors with a row of numbers for every position.
        rows: (n,), the row of each position.
        nodes: (n,), its place in the row.
        tokens: (batch, seq).
    """
    chosen = _Chosen(rows, nodes, tokens.shape)
    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(chosen.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(chosen.leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Chosen:
    """Selects positions from the inputs of a module and puts its output back at these positions.

    Tensors are (batch, seq, width), or (batch · seq, width) as OPT's MLP has them.
    """

    def __init__(self, rows: Tensor, nodes: Tensor, shape: torch.Size) -> None:
        self._places = rows * shape[1] + nodes
        self._shape = shape

    def enter(self, _module: nn.Module, arguments: Any, options: Mapping[str, Any]) -> Any:
        return tuple(map(self._taken, arguments)), {name: self._taken(value) for name, value in options.items()}

    def leave(self, _module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        full = output.new_zeros((self._shape.numel(), output.shape[-1]))
        full[self._places.to(output.device)] = output.flatten(0, -2)
        return full if output.dim() == 2 else full.view(*self._shape, -1)

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:-1] not in (self._shape, (self._shape.numel(),)):
            return value
        taken = value.flatten(0, -2)[self._places.to(value.device)]
        return taken if value.dim() == 2 else taken[None]


def _candidates(model: Any) -> Modules:
    """Return the modules with matrices after the attention of the last block that no hook watches."""
    found, plain = survey(model), base_model(model)
    block = plain.get_submodule(found.blocks[-1])
    inside = [site for site in found.sites if any(site.attention is module for module in block.modules())]
    beside = [child for child in block.children() if not any(site.attention in child.modules() for site in inside)]
    outputs = [plain.get_submodule(site.output_path) for site in inside if site.output_path != site.path]
    return tuple(
        module
        for module in [*outputs, *beside]
        if any(parameter.dim() > 1 for parameter in module.parameters()) and _is_unwatched(module)
    )


def _is_unwatched(module: nn.Module) -> bool:
    """Return whether a module has no hooks that read its inputs or outputs and is not compiled for its shapes."""
    parts = list(module.modules())
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    return not hooked and all(part._compiled_call_impl is None for part in parts)
