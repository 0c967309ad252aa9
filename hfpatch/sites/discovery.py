"""Finding the attention branch of every block of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family, family_of, how_to_declare, load_plugins
from hfpatch.sites.modules import base_model, has_module, submodule, text_config, unwrapped
from hfpatch.sites.site import AttentionSite, joined, read_site
from hfpatch.sites.structure import block_lists, read_family


@dataclass(frozen=True)
class Survey:
    """The attention sites of a model, block by block.

    Args:
        sites: the attention sites, first block first.
        skipped: the blocks without attention: index of the block -> its mixer.
        blocks: the path of every block, from the model, by index.
    """

    sites: list[AttentionSite]
    skipped: dict[int, str]
    blocks: list[str]


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """Return the attention site of every block, first block first; blocks without attention have none.

    Works on a plain model, one with adapters, and a ``PeftModel``; paths are those of the plain model.

    Raises:
        HfpatchError: if the model has no attention, is of no declared family and of no common structure, or does not
            have what its family declares.
    """
    return survey(model).sites


def survey(model: nn.Module) -> Survey:
    """Return the attention sites of a model and the blocks that have none.

    Raises:
        HfpatchError: as :func:`find_sites`.
    """
    base: Any = base_model(model)
    if not hasattr(getattr(base, "config", None), "model_type"):
        raise HfpatchError(f"{type(base).__name__} is not a transformers model: it has no config.model_type")
    load_plugins()
    config, family = text_config(base), family_of(base.config.model_type)
    sites: list[AttentionSite] = []
    skipped: dict[int, str] = {}

    # The text tower: the decoder; where that is the model itself, or something without blocks (some models call their
    # head so), the base model
    candidates = [base.get_decoder() if hasattr(base, "get_decoder") else base]
    candidates += [getattr(base, name, base) for name in ("base_model", "model")]
    towers = (c for c in candidates if c is not base and any(isinstance(m, nn.ModuleList) for m in c.modules()))
    tower = next(towers, base)
    prefix = next((name for name, module in base.named_modules() if module is tower), "")

    # The blocks, and what runs them all
    if family is None:
        lists = tuple(block_lists(tower))
        if len(lists) != 1:
            several = f"blocks with attention in several lists ({', '.join(lists)})"
            structure = several if lists else "no blocks of a known structure"
            raise HfpatchError(f"{type(base).__name__} has {structure}; {how_to_declare(base.config.model_type)}")
    else:
        lists = family.layers if isinstance(family.layers, tuple) else (family.layers,)
    of = f"family {family.name!r}" if family else type(tower).__name__
    blocks = [
        (joined(prefix, path, name), block)
        for path in lists
        for name, block in submodule(tower, path, of=of).named_children()
    ]
    holders = [path.split(".")[:-2] for path, _ in blocks]  # lists of blocks are not called, what holds them all is
    common = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*holders, strict=False))
    path_around = ".".join(names[0] for names in common)
    around = path_around, base.get_submodule(path_around)

    # The attention modules of each block
    for layer, (path, block) in enumerate(blocks):
        try:
            declared = family or read_family(block)
        except HfpatchError as error:
            raise HfpatchError(f"{error}; {how_to_declare(base.config.model_type)}") from error
        if declared is None or not _has_attention(declared, block):
            skipped[layer] = f"{type(block).__name__} without softmax attention"
            continue
        count = len(declared.attention) if isinstance(declared.attention, tuple) else 1
        sites += [
            read_site(declared, config, block, at=path, layer=layer, around=around, number=n) for n in range(count)
        ]
    if not sites:
        raise HfpatchError(
            f"{type(base).__name__} has no softmax attention in any of its {len(skipped)} blocks; "
            + how_to_declare(base.config.model_type)
        )
    return Survey(sites, skipped, [path for path, _ in blocks])


Refusal = Callable[[AttentionSite], "str | None"]


def select_sites(
    found: Survey, layers: int | Iterable[int] | None, *, refusal: Refusal = lambda site: None
) -> list[AttentionSite]:
    """Return the sites of the given layers; None means all that ``refusal`` gives no reason against.

    Raises:
        HfpatchError: if a layer is not in the model, has no attention or is refused, or if no site is left.
    """
    reasons: dict[int, str | None] = {}
    for site in found.sites:  # a block may hold several
        reasons[site.layer] = reasons.get(site.layer) or refusal(site)
    if layers is None:
        chosen = [site for site in found.sites if refusal(site) is None]
        if not chosen:
            raise HfpatchError(f"no layer of this model can be changed: {refusal(found.sites[0])}")
        return chosen
    wanted = [layers] if isinstance(layers, int) else sorted(set(layers))
    if not wanted:
        raise HfpatchError("layers_to_transform: no layer is given; leave it None for all")
    for layer in wanted:
        reason = found.skipped.get(layer) or reasons.get(layer)
        if reason is not None:
            raise HfpatchError(f"layers_to_transform: layer {layer} cannot be changed: {reason}")
    missing = [layer for layer in wanted if layer not in reasons]
    if missing:
        count = len(reasons) + len(found.skipped)
        raise HfpatchError(
            f"layers_to_transform: layers {missing} do not exist; this model has layers 0 to {count - 1}"
        )
    return [site for site in found.sites if site.layer in wanted]


def _has_attention(family: Family, block: nn.Module) -> bool:
    """Return whether a block of a hybrid holds attention; where the family is no hybrid, every block has to."""
    if not family.attention_classes:
        return True
    path = family.attention if isinstance(family.attention, str) else family.attention[0]
    if not has_module(block, path):
        return False
    return type(unwrapped(submodule(block, path, of=family.name))).__name__ in family.attention_classes
