"""Finding the attention branch of every block of a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family, families_of, family_of, how_to_declare, load_plugins
from hfpatch.sites.modules import base_model, has_module, submodule, text_config, unwrapped
from hfpatch.sites.site import AttentionSite, joined, read_site
from hfpatch.sites.structure import CROSS, attention_paths, block_lists, read_family


@dataclass(frozen=True)
class Survey:
    """The attention sites of a model, block by block.

    Args:
        sites: the attention sites of the language model, first block first; of a model without one, of all its towers.
        skipped: the blocks there without attention: index of the block -> its mixer.
        blocks: the path of every block there, from the model, by index.
        others: the sites of the other towers, such as encoders and vision towers; their blocks are counted on.
        other_blocks: the paths of these blocks.
        unknown: the attentions that are no such site, cross-attention or of an unknown form: path -> what they are.
    """

    sites: list[AttentionSite]
    skipped: dict[int, str]
    blocks: list[str]
    others: list[AttentionSite] = field(default_factory=list)
    other_blocks: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)

    def with_others(self) -> Survey:
        """Return the survey of all towers as one."""
        return replace(
            self,
            sites=[*self.sites, *self.others],
            blocks=[*self.blocks, *self.other_blocks],
            others=[],
            other_blocks=[],
        )


@dataclass(frozen=True)
class _BlockList:
    """A list of blocks: its path, its declaration or None, and the configuration of the model that it is part of."""

    path: str
    family: Family | None
    config: Any


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """Return the attention site of every block of the language model, first block first; blocks without have none.

    Of a model without a language model, those of all its towers. Works on a plain model, one with adapters, and a
    ``PeftModel``; paths are those of the plain model.

    Raises:
        HfpatchError: if the model has no attention, is of no declared family and of no common structure, or does not
            have what its family declares.
    """
    return survey(model).sites


def survey(model: nn.Module) -> Survey:
    """Return the attention sites of a model, the blocks that have none, and the attentions that are none.

    Raises:
        HfpatchError: as :func:`find_sites`.
    """
    base: Any = base_model(model)
    if not hasattr(getattr(base, "config", None), "model_type"):
        raise HfpatchError(f"{type(base).__name__} is not a transformers model: it has no config.model_type")
    load_plugins()
    every = _block_lists(base)
    main, failed = _main_lists(base, family_of(base.config.model_type), every)
    sites, skipped, blocks = _read(base, main, 0) if main else ([], {}, [])
    if not sites:
        kinds = ", ".join(sorted({type(module).__name__ for _, module in _attentions(base)}))
        problem = (
            f"blocks without self-attention of a known form ({kinds})" if kinds else "no attention that is recognised"
        )
        problem = f"no softmax attention in any of its {len(skipped)} blocks" if skipped else problem
        raise HfpatchError(f"{type(base).__name__} has {problem}; {how_to_declare(base.config.model_type)}")
    others: list[AttentionSite] = []
    other_blocks: list[str] = []
    for item in every:
        if item.path not in (*(part.path for part in main), *failed):
            try:
                more, _, named = _read(base, [item], len(blocks) + len(other_blocks))
            except HfpatchError as error:
                failed[item.path] = str(error)
            else:
                others, other_blocks = [*others, *more], [*other_blocks, *named]
    paths = [site.path for site in (*sites, *others)] + [blocks[layer] for layer in skipped]
    unknown: dict[str, str] = {}
    for path, module in _attentions(base):
        if not _overlap(path, paths) and not _overlap(path, unknown):
            unknown[path] = _kind(path, module, failed)
    return Survey(sites, skipped, blocks, others, other_blocks, unknown)


def _main_lists(
    base: Any, family: Family | None, every: Sequence[_BlockList]
) -> tuple[list[_BlockList], dict[str, str]]:
    """Return the lists of blocks of the language model; of a model without one, all that can be read.

    Beside them, why the others cannot, by path.
    """
    prefix, tower = _text_tower(base)
    if family is not None:
        paths = family.layers if isinstance(family.layers, tuple) else (family.layers,)
        for path in paths:
            submodule(tower, path, of=f"family {family.name!r}")
        return [_BlockList(joined(prefix, path), family, text_config(base)) for path in paths], {}
    inside = [item for item in every if prefix and item.path.startswith(f"{prefix}.")]
    if inside and _is_language_model(base, inside[0], prefix):
        return [replace(item, config=text_config(base)) for item in inside], {}
    readable: list[_BlockList] = []
    failed: dict[str, str] = {}
    for item in every:
        try:
            _read(base, [item], 0)
            readable.append(item)
        except HfpatchError as error:
            failed[item.path] = str(error)
            if len(every) == 1:
                raise
    return readable, failed


def _text_tower(base: Any) -> tuple[str, nn.Module]:
    """Return the path and the module of the text tower.

    That is the decoder; where that is the model itself, or something without blocks (some models call their head so),
    the base model.
    """
    candidates = [base.get_decoder() if hasattr(base, "get_decoder") else base]
    candidates += [getattr(base, name, base) for name in ("base_model", "model")]
    modules = (c for c in candidates if isinstance(c, nn.Module) and c is not base)
    towers = (c for c in modules if any(isinstance(m, nn.ModuleList) for m in c.modules()))
    tower = next(towers, base)
    return next((name for name, module in base.named_modules() if module is tower), ""), tower


def _is_language_model(base: nn.Module, blocks: _BlockList, prefix: str) -> bool:
    """Return whether the text tower is a language model, and not a decoder of images or one of several encoders."""
    block = next(iter(base.get_submodule(blocks.path).children()))
    attention = next((block.get_submodule(path) for path in attention_paths(block)), None)
    causal = getattr(attention, "is_causal", False)  # those of T5 and its like do not say
    return bool(causal) or has_module(base.get_submodule(prefix), "embed_tokens")


def _block_lists(base: nn.Module) -> list[_BlockList]:
    """Return the lists of blocks of all towers: declared ones, and ones of a known structure."""
    lists: list[_BlockList] = []
    from transformers import PreTrainedModel  # takes a second to import, which an evaluation of a base does without

    owners = {name: module for name, module in base.named_modules() if isinstance(module, PreTrainedModel)}
    for at, owner in owners.items():
        for family in families_of(owner.config.model_type):
            start = joined(at, family.tower or "")
            for path in family.layers if isinstance(family.layers, tuple) else (family.layers,):
                full = joined(start, path)
                if has_module(base, full) and full not in [blocks.path for blocks in lists]:
                    lists.append(_BlockList(full, family, owner.config))
    declared = [f"{blocks.path}." for blocks in lists]
    for path in block_lists(base):
        if not f"{path}.".startswith(tuple(declared)):
            owner = owners[max((at for at in owners if not at or path.startswith(f"{at}.")), key=len)]
            lists.append(_BlockList(path, None, owner.config))
    order = {name: index for index, (name, _) in enumerate(base.named_modules())}
    return sorted(lists, key=lambda blocks: order[blocks.path])


def _read(base: Any, lists: Sequence[_BlockList], first: int) -> tuple[list[AttentionSite], dict[int, str], list[str]]:
    """Return the sites in lists of blocks, the blocks without attention, and the paths of all; counted from ``first``.

    Raises:
        HfpatchError: if a block is not as it is declared, or of no known structure.
    """
    sites: list[AttentionSite] = []
    skipped: dict[int, str] = {}
    blocks = [
        (joined(item.path, name), block, item)
        for item in lists
        for name, block in base.get_submodule(item.path).named_children()
    ]
    holders = [path.split(".")[:-2] for path, _, _ in blocks]  # lists of blocks are not called, what holds them all is
    common = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*holders, strict=False))
    path_around = ".".join(names[0] for names in common)
    around = path_around, base.get_submodule(path_around)
    for layer, (path, block, item) in enumerate(blocks, first):
        if isinstance(original := getattr(block, "original_module", None), nn.Module):  # beside a trained copy
            path, block = joined(path, "original_module"), original
        try:
            declared = item.family or read_family(block)
        except HfpatchError as error:
            raise HfpatchError(f"{error}; {how_to_declare(base.config.model_type)}") from error
        if declared is None or not _has_attention(declared, block):
            skipped[layer] = f"{type(block).__name__} without softmax attention"
            continue
        count = len(declared.attention) if isinstance(declared.attention, tuple) else 1
        sites += [
            read_site(declared, item.config, block, at=path, layer=layer, around=around, number=n) for n in range(count)
        ]
    return sites, skipped, [path for path, _, _ in blocks]


def _attentions(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters that call themselves attention, by path."""
    for path, module in base.named_modules():
        if (
            re.search(r"(Attention|Attn)(?!\w*(Residual|Output|Norm|Gate))", type(module).__name__)
            and next(module.parameters(), None) is not None
        ):
            yield path, module


def _overlap(path: str, others: Iterable[str]) -> bool:
    """Return whether a module is one of the others, around one or inside one."""
    return any(f"{path}.".startswith(f"{one}.") or f"{one}.".startswith(f"{path}.") for one in others)


def _kind(path: str, module: nn.Module, failed: Mapping[str, str]) -> str:
    if CROSS.search(path) or CROSS.search(type(module).__name__):
        return "cross-attention"
    why = next((why for at, why in failed.items() if path.startswith(f"{at}.")), "")
    return f"{type(module).__name__}, {why.partition(';')[0] or 'of an unknown form'}"


Refusal = Callable[[AttentionSite], "str | None"]


def select_sites(
    surveyed: Survey, layers: int | Iterable[int] | None, *, refusal: Refusal = lambda site: None
) -> list[AttentionSite]:
    """Return the sites of the given layers; None means all that ``refusal`` gives no reason against.

    Raises:
        HfpatchError: if a layer is not in the model, has no attention or is refused, or if no site is left.
    """
    reasons: dict[int, str | None] = {}
    for site in surveyed.sites:  # a block may hold several
        reasons[site.layer] = reasons.get(site.layer) or refusal(site)
    if layers is None:
        chosen = [site for site in surveyed.sites if refusal(site) is None]
        if not chosen:
            why = f"no layer of this model can be changed: {refusal(surveyed.sites[0])}"
            hint = f"; target_modules can name other towers, as {surveyed.others[0].path}" if surveyed.others else ""
            raise HfpatchError(why + hint)
        return chosen
    wanted = [layers] if isinstance(layers, int) else sorted(set(layers))
    if not wanted:
        raise HfpatchError("layers_to_transform: no layer is given; leave it out for all")
    for layer in wanted:
        reason = surveyed.skipped.get(layer) or reasons.get(layer)
        if reason is not None:
            raise HfpatchError(f"layers_to_transform: layer {layer} cannot be changed: {reason}")
    if missing := [layer for layer in wanted if layer not in reasons]:
        last = len(reasons) + len(surveyed.skipped) - 1
        raise HfpatchError(f"layers_to_transform: layers {missing} do not exist; this model has layers 0 to {last}")
    return [site for site in surveyed.sites if site.layer in wanted]


def _has_attention(family: Family, block: nn.Module) -> bool:
    """Return whether a block of a hybrid holds attention; where the family is no hybrid, every block has to."""
    if not family.attention_classes:
        return True
    path = family.attention if isinstance(family.attention, str) else family.attention[0]
    if not has_module(block, path):
        return False
    return type(unwrapped(submodule(block, path, of=family.name))).__name__ in family.attention_classes
