"""A share of the first layer's value in the value of every later layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite, Parts
from hfpatch.tuners.registration import method


@method("value_residual", shares=True)
@dataclass
class ValueResidualConfig(MethodConfig):
    r"""Moves the value of every layer towards the value that the first layer computed for the same token.

    .. math::
        v_l <- v_l + λ_l (v_1 - v_l)                   λ_l: one number, or one for each key/value head;  λ = 0 at init

    v_1 is the value as projected in the first layer that the method changes, which itself gets no λ. λ = 0 is an exact
    no-op; λ = 1 gives a layer the first one's value. What is kept in the K/V cache is the changed value, so decoding
    needs nothing of earlier steps. Parameters: one a layer, or one a key/value head, except in the first layer. Layers
    whose value has another width than the first's are left out. Source: arXiv 2410.17897, *Value Residual Learning*.

    Args:
        per_head: one λ for each key/value head instead of one for all of them.
    """

    per_head: bool = field(default=False, metadata={"help": "One λ a key/value head instead of one a layer."})

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return λ, zero: one, or one for each key/value head; nothing in the first layer.

        Raises:
            HfpatchError: if the architecture does not say how many key/value heads there are.
        """
        if site.is_first:
            return nn.ModuleDict()
        heads = 1
        if self.per_head:
            columns = site.head_count * site.width("value")  # of heads and k columns each, site.mixed_size is heads·k
            if not site.mixed_size or columns % site.mixed_size:
                raise HfpatchError(
                    f"layer {site.layer}: the architecture does not say how many key/value heads it has; leave "
                    "per_head out"
                )
            heads = columns // site.mixed_size
        return nn.ModuleDict({"mix": ValueMix(heads)})

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        return "it adds the value of another layer"

    def value(self, parts: Parts, v: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the mixed value ``(batch, seq, heads·size)``; the first layer's goes on as it is."""
        if site.is_first:
            site.shared["value"] = v.clone()  # OLMo clips what its projections return in place
            return v
        mixed: Tensor = parts["mix"](v, site.shared["value"].to(v))
        return mixed

    def refusal_after(self, first: AttentionSite, site: AttentionSite) -> str | None:
        """Return why the value of ``first`` cannot be added to that of a site."""
        lists = [s.block_path.rpartition(".")[0] for s in (first, site)]
        if lists[0] != lists[1]:
            return f"the value of layer {first.layer} is of another list of blocks, {lists[0]}, not {lists[1]}"
        widths = [s.projections["value"].columns.size for s in (first, site)]
        if widths[0] != widths[1]:
            return f"its value has {widths[1]} columns, that of layer {first.layer}, which would be added, {widths[0]}"
        return None


class ValueMix(nn.Module):
    """λ of one layer, for all heads together or for each."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self, value: Tensor, first: Tensor) -> Tensor:
        """Return v + λ (v_1 - v) for both ``(batch, seq, heads·size)``."""
        by_head = torch.unflatten(first - value, -1, (len(self.weight), -1))  # (batch, seq, heads, size)
        return value + (self.weight[:, None] * by_head).reshape(value.shape)
