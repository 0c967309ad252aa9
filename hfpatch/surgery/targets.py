"""The modules that ``target_modules: attention``, ``mlp`` and ``all-linear`` name in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hfpatch.errors import HfpatchError
from hfpatch.sites import Survey, base_model, select_sites, survey
from hfpatch.surgery.budget import attention_modules

ATTENTION = "attention"
SHORTHANDS = (ATTENTION, "mlp", "all-linear")


def target_names(
    model: nn.Module,
    shorthand: str,
    *,
    layers: int | Sequence[int] | None = None,
    pattern: str | Sequence[str] | None = None,
) -> list[str]:
    """Return the full names of the modules of a shorthand.

    ``attention``: the QKV projection(s) and the output projection; ``mlp``: the other linear projections of the blocks,
    without fused experts; ``all-linear``: every linear projection but the head, as in PEFT.

    Args:
        model: the base.
        shorthand: one of :data:`SHORTHANDS`.
        layers: index or indices of the layers, as in ``layers_to_transform``; None takes all.
        pattern: name or names of the lists of layers, as in PEFT's ``layers_pattern``; None takes all.

    Raises:
        HfpatchError: if there are none, or a layer does not exist.
    """
    if shorthand == ATTENTION:
        return attention_modules(model, layers=layers, pattern=pattern)
    if pattern is not None:
        raise HfpatchError(f"layers_pattern does not go with target_modules={shorthand}; leave it out")
    base: Any = base_model(model)
    head = base.get_output_embeddings()
    linear = [(name, module) for name, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    names = [name for name, module in linear if module is not head]
    if shorthand == "mlp" or layers is not None:
        found = survey(model)
        chosen = range(len(found.blocks)) if layers is None else {site.layer for site in select_sites(found, layers)}
        blocks = [found.blocks[index] for index in chosen]
        names = [name for name in names if any(name.startswith(f"{block}.") for block in blocks)]
        if shorthand == "mlp":
            names = _outside_attention(names, found)
    if not names:
        raise HfpatchError(f"target_modules={shorthand}: this model has no such linear projection; name its modules")
    return names


def _outside_attention(names: Sequence[str], found: Survey) -> list[str]:
    """Return the modules that are not the attention's.

    Blocks without attention may have another mixer there: of these, only modules whose names are also beside the
    attention of other blocks.
    """
    attention = tuple(f"{site.path}." for site in found.sites)
    outputs = {path for site in found.sites for path in site.linear_paths}
    parts = {block: {n for n in names if n.startswith(f"{block}.")} for block in found.blocks}
    beside = {
        block: {n for n in inside if not n.startswith(attention) and n not in outputs}
        for index, (block, inside) in enumerate(parts.items())
        if index not in found.skipped
    }
    known = {n[len(block) + 1 :].split(".")[0] for block, inside in beside.items() for n in inside}
    for index in found.skipped:
        block = found.blocks[index]
        beside[block] = {n for n in parts.get(block, ()) if n[len(block) + 1 :].split(".")[0] in known}
    chosen = set().union(*beside.values())
    return [name for name in names if name in chosen]
