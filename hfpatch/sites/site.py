"""The attention branch of one block, and how a declaration is read against a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family
from hfpatch.sites.heads import SHARED_NORM, QueryHeads, has_norm, query_heads
from hfpatch.sites.layouts import Projections, require_columns
from hfpatch.sites.modules import features, linear_path, linear_paths, submodule, unwrapped


@dataclass(frozen=True)
class AttentionSite:
    """The attention branch of one block.

    Args:
        layer: index of the block; lists of blocks are counted one after the other.
        name: ``layer.<index>``, followed by a number if a block holds several attention modules.
        family: name of the family that declared it.
        path: path of the attention module, from the model.
        attention: the attention module; the hidden state enters here, normed already.
        hidden_size: d, the width of the hidden state.
        projections: where query, key and value are computed, by target; paths are relative to the attention.
        heads: the query heads; None where no projection computes the query.
        output_path: path of the output projection, from the model.
        exit_path: path, from the model, of the module whose output is added to the residual stream.
        exit: that module, possibly the attention itself.
        exit_factor: the factor of the exit's output before it is added to the residual stream.
        entries: the modules that read the hidden state; the attention itself unless it is exchanged at run time.
        norm: the module whose output is the hidden state, where it has to be changed there; else None.
        host_path: path, from the model, of the module that added modules are put under.
        host: that module.
        input_gradients: whether training needs gradients of the first block's input.
        block_path: path of the block, from the model.
        block: the block; everything above is called inside its forward.
        around_path: path, from the model, of the module whose forward runs all blocks.
        around: that module.
        count: how many attention modules the block holds.
        refusals: unsupported changes, with the reason.
    """

    layer: int
    name: str
    family: str
    path: str
    attention: nn.Module
    hidden_size: int
    projections: Projections
    heads: QueryHeads | None
    output_path: str
    exit_path: str
    exit: nn.Module
    exit_factor: float
    entries: tuple[nn.Module, ...]
    norm: nn.Module | None
    host_path: str
    host: nn.Module
    input_gradients: bool
    block_path: str
    block: nn.Module
    around_path: str
    around: nn.Module
    count: int = 1
    refusals: Mapping[str, str] = field(default_factory=dict)

    def projection_module(self, target: str) -> nn.Module:
        """Return the original module (no adapter around it) that computes ``query``, ``key`` or ``value``."""
        return self.inner_module(self.projections[target].path)

    def inner_module(self, path: str) -> nn.Module:
        """Return the original module (no adapter around it) at a path below the attention."""
        return unwrapped(submodule(self.attention, path, of=self.family))

    @property
    def reads_earlier_keys(self) -> bool:
        """Whether the attention reads keys and values that the attention of an earlier block computed."""
        return bool(getattr(self.attention, "is_kv_shared_layer", False))

    @property
    def linear_paths(self) -> list[str]:
        """The matrices that compute query, key and value, and the output projection: paths from the model."""
        inner = [p for projection in self.projections.values() for p in (projection.source, projection.path) if p]
        output = [] if self.output_path == self.path else [self.output_path]  # experts may compute it
        paths = [path for p in inner for path in linear_paths(self.inner_module(p), joined(self.path, p))]
        return list(dict.fromkeys([*paths, *output]))


def read_site(
    family: Family,
    config: Any,
    block: nn.Module,
    *,
    at: str,
    layer: int,
    around: tuple[str, nn.Module],
    number: int = 0,
) -> AttentionSite:
    """Read a declaration against a block: the site of its ``number``-th attention module.

    Args:
        family: the declaration.
        config: the text configuration.
        block: the block.
        at: path of the block, from the model.
        layer: index of the block.
        around: path, from the model, and module that runs all blocks.
        number: which of the declared attention modules.

    Raises:
        HfpatchError: if a declared attribute is missing; the message names it.
    """
    of = f"family {family.name!r}, layer {layer}"

    # The attention, and where its branch ends
    paths = family.attention if isinstance(family.attention, tuple) else (family.attention,)
    attention, path = submodule(block, paths[number], of=of), joined(at, paths[number])
    exit_path = path if family.exit is None else joined(at, family.exit)
    output = family.output
    if output is not None:
        submodule(attention, output, of=of)
        output = linear_path(attention, output) or output
    try:
        factor = 1.0 if family.factor is None else float(family.factor(block))
    except AttributeError as error:
        raise HfpatchError(f"{of}: the declared factor cannot be read: {error}") from error

    # Its projections, the first of which reads the hidden state
    projections = family.qkv(attention, config)
    require_columns(attention, projections, of=of)
    first = next(iter(projections.values()))
    reader = unwrapped(submodule(attention, first.source or first.path, of=of))

    if family.query_norm is not None:
        submodule(attention, family.query_norm, of=of)

    # What cannot be changed
    refusals = dict(family.refusals(attention) if callable(family.refusals) else family.refusals)
    if has_norm(attention, SHARED_NORM):
        alike = f"{SHARED_NORM} norms queries and keys alike, so that the query has no place of its own"
        refusals.setdefault("temperature", alike)
    if not factor:
        refusals["content_skip"] = "the branch is multiplied by 0"

    return AttentionSite(
        layer=layer,
        name=f"layer.{layer}" + (f".{number}" if number else ""),
        family=family.name,
        path=path,
        attention=attention,
        hidden_size=features(reader)[0],
        projections=projections,
        heads=query_heads(attention, config, projections, family),
        output_path=exit_path if output is None else joined(path, output),
        exit_path=exit_path,
        exit=attention if family.exit is None else submodule(block, family.exit, of=of),
        exit_factor=factor,
        entries=tuple(submodule(attention, p, of=of) for p in family.entries) or (attention,),
        norm=None if family.norm is None else submodule(block, family.norm, of=of),
        host_path=path if family.host is None else joined(at, family.host),
        host=attention if family.host is None else submodule(block, family.host, of=of),
        input_gradients=family.input_gradients,
        block_path=at,
        block=block,
        around_path=around[0],
        around=around[1],
        count=len(paths),
        refusals=refusals,
    )


def joined(*paths: str) -> str:
    """Join dotted paths, leaving out the empty ones."""
    return ".".join(path for path in paths if path)
