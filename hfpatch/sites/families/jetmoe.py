"""JetMoE: a mixture of attention heads; each token's queries are computed by the experts it is sent to."""

from typing import Any

from torch import nn

from hfpatch.sites.columns import Columns
from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Projection, Projections, divide, out_features

FUSED = "kv_proj"


def jetmoe_qkv(attention: nn.Module, config: Any) -> Projections:
    """Read the columns of the form [k all, v all]."""
    total = out_features(attention, FUSED)
    half = divide(total, 2, FUSED)
    return {t: Projection(FUSED, Columns(1, total, i * half, half)) for i, t in enumerate(("key", "value"))}


register_family(
    Family(
        name="jetmoe",
        model_types=("jetmoe",),
        layers="layers",
        attention="self_attention",
        qkv=jetmoe_qkv,
        output=None,
        refusals={"query": "queries are computed by a mixture of experts, not by one projection"},
    )
)
