"""The last block at scored positions alone, where the rest of its output is not read.

Behind the last attention no position sees another one: the output projection and the MLP of the last block may leave
out all positions that are not scored. They run as they are, on fewer rows; zeros take the place of what they leave out.
That is most of a block, a sixth of a model with six blocks.
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
from hfpatch.sites.lm_head import close

Modules = tuple[nn.Module, ...]


def find_trimmable(model: Any, parts: Parts, probe: Tensor) -> Modules:
    """Return the modules of the last block that may leave out positions, all of them tried on a probe; or none.

    Args:
        model: a causal language model, with adapters or without.
        parts: the model in two steps.
        probe: at least 4 tokens (1, seq).
    """
    if not isinstance(parts, BodyAndHead):
        return ()
    try:
        modules = _candidates(model)
        whole = parts.features(probe)
        nodes = torch.arange(1, probe.shape[1], 3, device=probe.device)
        rows = torch.zeros_like(nodes)
        with only_at(modules, rows, nodes, probe):
            trimmed = parts.features(probe)
    except (HfpatchError, AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError):
        return ()
    same = close(trimmed[rows, nodes].float(), whole[rows, nodes].float(), model.dtype)
    return modules if same else ()


@contextmanager
def only_at(modules: Sequence[nn.Module], rows: Tensor, nodes: Tensor, tokens: Tensor) -> Iterator[None]:
    """Let modules compute some positions of a batch only, while the block runs.

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
    """Takes positions out of what a module is given, and puts them back in what it gives.

    Tensors are (batch, seq, width), or (batch · seq, width) as OPT's MLP has them.
    """

    def __init__(self, rows: Tensor, nodes: Tensor, shape: torch.Size) -> None:
        self._places = rows * shape[1] + nodes
        self._shape = shape

    def enter(self, _module: nn.Module, arguments: Any, options: Mapping[str, Any]) -> Any:
        return tuple(map(self._taken, arguments)), {name: self._taken(value) for name, value in options.items()}

    def leave(self, _module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        whole = output.new_zeros((self._shape.numel(), output.shape[-1]))
        whole[self._places.to(output.device)] = output.flatten(0, -2)
        return whole if output.dim() == 2 else whole.view(*self._shape, -1)

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:-1] not in (self._shape, (self._shape.numel(),)):
            return value
        taken = value.flatten(0, -2)[self._places.to(value.device)]
        return taken if value.dim() == 2 else taken[None]


def _candidates(model: Any) -> Modules:
    """Return what multiplies matrices in the last block, but for what the attention is computed from."""
    found, plain = survey(model), base_model(model)
    block = plain.get_submodule(found.blocks[-1])
    inside = [site for site in found.sites if any(site.attention is module for module in block.modules())]
    beside = [child for child in block.children() if not any(site.attention in child.modules() for site in inside)]
    outputs = [plain.get_submodule(site.output_path) for site in inside if site.output_path != site.path]
    return tuple(module for module in [*outputs, *beside] if _holds_matrices(module) and _is_unwatched(module))


def _holds_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _is_unwatched(module: nn.Module) -> bool:
    """Return whether no hook reads what goes in and out of a module, and nothing is compiled for its shapes."""
    parts = list(module.modules())
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    return not hooked and all(part._compiled_call_impl is None for part in parts)
