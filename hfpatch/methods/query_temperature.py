"""A temperature for the query of each head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from hfpatch.nn import QueryTemperature, scale_heads
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite, Parts
from hfpatch.tuners.registration import method


@method("query_temperature", prefix="temperature_", child="hfpatch_scale")
@dataclass
class QueryTemperatureConfig(MethodConfig):
    """q_h (1 + τ_h), one trained number for each query head; τ = 0 at init, an exact no-op.

    Several adapters multiply. A rotation of the query commutes with it. See :class:`hfpatch.nn.QueryTemperature` for
    the mathematics. It has no options beyond ``layers_to_transform``; there is nothing that ``seed`` draws.
    """

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return τ."""
        return nn.ModuleDict({"query": QueryTemperature(heads=site.head_count)})

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        return None

    def heads(self, parts: Parts, q: Tensor, site: MethodSite) -> Tensor:
        """Return the scaled query ``(batch, seq, heads, size)``."""
        return scale_heads(q, parts["query"].weight, q.dim() - 2)
