"""The query-temperature tuner layer."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn import QueryTemperature, scale_heads
from hfpatch.nn.columns import on_all_columns
from hfpatch.sites import AttentionSite, QueryHeads
from hfpatch.tuners.layer import SurgeryLayer
from hfpatch.tuners.query_temperature.config import QueryTemperatureConfig


class QueryTemperatureLayer(SurgeryLayer):
    """Multiplies the query of each head by 1 + τ_h.

    The hook sits on the norm that the query passes, or where there is none on the original projection, inside a LoRA
    layer if there is one: LoRA's own term is then added to the scaled query. A rotation of the query commutes with it.
    Several active adapters multiply.
    """

    method = "query temperature"
    child_name = "hfpatch_scale"
    adapter_layer_names = ("temperature_query",)

    def register(self, site: AttentionSite) -> None:
        """Hook into the query's norm, or into its projection."""
        self.path = site.path
        self.columns, self.heads = site.projections["query"].columns, cast("QueryHeads", site.heads)
        if self.heads.norm is None:
            self.after(site.projection_module("query"), QueryTemperatureLayer._scale_projected)
        else:
            self.after(site.inner_module(self.heads.norm), QueryTemperatureLayer._scale_normed)

    def build(self, config: QueryTemperatureConfig, name: str) -> dict[str, nn.Module]:
        """Return τ."""
        return {"temperature_query": QueryTemperature(heads=self.heads.count)}

    def tau(self, adapter_name: str) -> Tensor:
        """Return τ ``(heads,)`` of an adapter."""
        return cast("Tensor", self.held("temperature_query")[adapter_name].weight)

    def scale(self, query: Tensor, axis: int) -> Tensor:
        """Scale the heads along an axis (-1: of the last one together) by every working adapter."""
        for name in self.working_adapters():
            query = scale_heads(query, self.tau(name), axis)
        return query

    def _scale_projected(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        if not self.working_adapters():
            return output
        return on_all_columns(
            module, output, lambda every: self.columns.write(every, self.scale(self.columns.read(every), -1))
        )

    def _scale_normed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if not self.working_adapters():
            return output
        if hasattr(getattr(self.get_base_layer(), "weight", None), "placements"):
            raise HfpatchError(
                f"{self.path}: a query temperature that acts behind a norm of the query does not take tensor "
                "parallelism (--tp), in which each process has some heads; leave one of them out"
            )
        return self.scale(output, self.heads.axis(output, self.columns.size, at=self.path))
