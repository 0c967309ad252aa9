"""Heads that take from each other before the output projection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from hfpatch import MethodConfig, MethodSite, Parts, method


@method("head_mix")
@dataclass
class HeadMix(MethodConfig):
    r"""Adds to what each head returns a learned mixture of all heads.

    .. math::
        branch = (A + A M) W_O                         A: heads × size;  M: heads × heads, or one such for each column

    M = 0 at init: an exact no-op. Parameters: heads² per layer, or heads²·size.

    Args:
        shared: whether the columns of a head share their M (``head``) or each has its own (``column``).
    """

    shared: Literal["head", "column"] = field(default="head", metadata={"help": "head or column."})

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return M, zero: a linear map of all heads for every column, or for all columns."""
        columns = 1 if self.shared == "head" else (site.mixed_size or 0) // site.head_count
        mixes = nn.Linear(site.head_count, columns * site.head_count, bias=False)
        nn.init.zeros_(mixes.weight)
        return nn.ModuleDict({"mix": mixes})

    def mixed(self, parts: Parts, a: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the mixed heads ``(batch, seq, heads·size)``."""
        heads = a.unflatten(-1, (site.head_count, -1))  # (batch, seq, heads, size)
        mixes: Tensor = parts["mix"].weight.unflatten(0, (-1, site.head_count))  # (columns or 1, heads, heads)
        mixes = mixes.expand(heads.shape[-1], -1, -1)
        return a + torch.einsum("bshk,kgh->bsgk", heads, mixes).flatten(-2)
