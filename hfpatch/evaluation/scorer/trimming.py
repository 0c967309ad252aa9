"""The last block at scored positions alone, where the rest of its output is not read.

After the last attention each position is computed separately: the output projection and the MLP of the last block can
skip all positions that are not scored. They run unchanged, on fewer rows; skipped positions are filled with zeros. That
is most of a block, a sixth of a model with six blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer.head import BodyAndHead, Parts
from hfpatch.sites import base_model, survey
from hfpatch.support.modes import hooked

Modules = tuple[nn.Module, ...]


def behind_attention(model: Any, parts: Parts) -> Modules:
    """Return the modules of the last block after its attention, if a trial may find that they can skip positions.

    A survey reads every block, so a scorer asks once.
    """
    if not isinstance(parts, BodyAndHead):
        return ()
    try:
        surveyed, plain = survey(model), base_model(model)
        block = plain.get_submodule(surveyed.blocks[-1])
        inside = [site for site in surveyed.sites if any(site.attention is module for module in block.modules())]
        beside = [child for child in block.children() if not any(site.attention in child.modules() for site in inside)]
        outputs = [plain.get_submodule(site.output_path) for site in inside if site.output_path != site.path]
    except (HfpatchError, AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError):
        return ()
    return (*outputs, *beside)


def trimmable(modules: Modules) -> Modules:
    """Return those of the modules that have matrices, and that no hook watches now."""
    chosen = []
    for module in modules:
        below = list(module.modules())
        watched = any(part._forward_hooks or part._forward_pre_hooks for part in below)
        compiled = any(part._compiled_call_impl is not None for part in below)  # for its shapes
        if not watched and not compiled and any(parameter.dim() > 1 for parameter in module.parameters()):
            chosen.append(module)
    return tuple(chosen)


@contextmanager
def only_at(modules: Sequence[nn.Module], rows: Tensor, nodes: Tensor, tokens: Tensor) -> Iterator[None]:
    """Let modules, which map each position by itself, compute only some of ``tokens`` (batch, seq) inside the block.

    ``rows`` and ``nodes``, (n,), are the row of each position and its index in that.
    """
    positions, shape = rows * tokens.shape[1] + nodes, tokens.shape

    def taken(value: Any) -> Any:
        """Select positions of (batch, seq, width), or of (batch · seq, width) as OPT's MLP has them."""
        if not isinstance(value, Tensor) or value.shape[:-1] not in (shape, (shape.numel(),)):
            return value
        chosen = value.flatten(0, -2)[positions.to(value.device)]
        return chosen if value.dim() == 2 else chosen[None]

    def enter(_module: nn.Module, arguments: Any, options: Mapping[str, Any]) -> Any:
        return tuple(map(taken, arguments)), {name: taken(value) for name, value in options.items()}

    def leave(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        full = output.new_zeros((shape.numel(), output.shape[-1]))
        full[positions.to(output.device)] = output.flatten(0, -2)
        return full if output.dim() == 2 else full.view(*shape, -1)

    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    with hooked(handles):
        yield
