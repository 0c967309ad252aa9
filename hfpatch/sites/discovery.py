"""Finding the attention branch of every block of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family, family_of
from hfpatch.sites.layouts import Projections
from hfpatch.sites.modules import features, submodule, unwrapped


@dataclass(frozen=True)
class AttentionSite:
    """The attention branch of one block.

    Args:
        layer: index of the block.
        family: name of the family that declared it.
        path: path of the attention module, from the model.
        attention: the attention module; the hidden state enters here, normed already.
        hidden_size: d, the width of the hidden state.
        projections: where query, key and value are computed, by target; paths are relative to the attention.
        output: path of the output projection, relative to the attention.
        exit_path: path, from the model, of the module whose output is added to the residual stream.
        exit: that module; the attention itself where nothing stands between.
    """

    layer: int
    family: str
    path: str
    attention: nn.Module
    hidden_size: int
    projections: Projections
    output: str
    exit_path: str
    exit: nn.Module

    def projection_module(self, target: str) -> nn.Module:
        """Return the original module (no adapter around it) that computes ``query``, ``key`` or ``value``."""
        return unwrapped(submodule(self.attention, self.projections[target].path, of=self.family))

    @property
    def linear_names(self) -> list[str]:
        """The QKV projection(s) and the output projection, relative to the attention, each once."""
        return list(dict.fromkeys([*(p.path for p in self.projections.values()), self.output]))


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """Return the attention site of every block, first block first.

    Works on a plain model, one with adapters, and a ``PeftModel``; paths are those of the plain model.

    Raises:
        HfpatchError: if the model is of no declared family, or does not have what its family declares.
    """
    base = base_model(model)
    config = getattr(base, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise HfpatchError(f"{type(base).__name__} is not a transformers model: it has no config.model_type")
    family = family_of(config.model_type)
    blocks = submodule(base, family.layers, of=f"family {family.name!r}")
    return [_site(family, config, layer, block) for layer, block in enumerate(blocks.children())]


def select_sites(sites: list[AttentionSite], layers: int | Iterable[int] | None) -> list[AttentionSite]:
    """Return the sites of the given layers; None means all.

    Raises:
        HfpatchError: if a layer is not in the model, or none is given.
    """
    if layers is None:
        return sites
    wanted = [layers] if isinstance(layers, int) else sorted(set(layers))
    known = {site.layer: site for site in sites}
    missing = [layer for layer in wanted if layer not in known]
    if missing or not wanted:
        what = f"layers {missing} do not exist" if missing else "no layer is given"
        raise HfpatchError(f"layers_to_transform: {what}; this model has layers 0 to {len(sites) - 1}")
    return [known[layer] for layer in wanted]


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a ``PeftModel``, or the model itself."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _site(family: Family, config: object, layer: int, block: nn.Module) -> AttentionSite:
    of = f"family {family.name!r}, layer {layer}"
    attention = submodule(block, family.attention, of=of)
    submodule(attention, family.output, of=of)
    projections = family.qkv(attention, config)
    query = unwrapped(submodule(attention, projections["query"].path, of=of))
    path = f"{family.layers}.{layer}.{family.attention}"
    return AttentionSite(
        layer=layer,
        family=family.name,
        path=path,
        attention=attention,
        hidden_size=features(query)[0],
        projections=projections,
        output=family.output,
        exit_path=path if family.exit is None else f"{family.layers}.{layer}.{family.exit}",
        exit=attention if family.exit is None else submodule(block, family.exit, of=of),
    )
