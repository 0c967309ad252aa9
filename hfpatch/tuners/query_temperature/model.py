"""The query-temperature tuner."""

from __future__ import annotations

from hfpatch.sites import AttentionSite
from hfpatch.tuners.model import SurgeryTuner
from hfpatch.tuners.query_temperature.config import QueryTemperatureConfig
from hfpatch.tuners.query_temperature.layer import QueryTemperatureLayer


class QueryTemperatureModel(SurgeryTuner):
    """Injects a temperature for the query of each head into a causal language model."""

    prefix = "temperature_"
    tuner_layer_cls = QueryTemperatureLayer

    @staticmethod
    def refusal(site: AttentionSite, config: QueryTemperatureConfig) -> str | None:
        """Return why the queries of this site cannot be scaled."""
        name = type(site.attention).__name__
        if refused := site.refusals.get("query") or site.refusals.get("temperature"):
            return refused
        if "query" not in site.projections:
            return f"{name} has no projection that computes the query alone"
        return f"{name} does not say how many query heads it has" if site.heads is None else None
