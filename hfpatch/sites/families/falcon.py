"""Falcon: one fused projection, whose layout two switches of the config decide."""

from typing import Any

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Projections, concatenated_columns, grouped_columns

FUSED = "query_key_value"


def falcon_qkv(attention: nn.Module, config: Any) -> Projections:
    """Per key/value group (new decoder), one shared key and value (multi-query), or per head."""
    heads = config.num_attention_heads
    if config.new_decoder_architecture:
        return grouped_columns(attention, FUSED, heads=heads, groups=config.num_kv_heads)
    if config.multi_query:
        return concatenated_columns(attention, FUSED, heads=heads, kv_heads=1)
    return grouped_columns(attention, FUSED, heads=heads, groups=heads)


register_family(
    Family(
        name="falcon",
        model_types=("falcon",),
        layers="h",
        attention="self_attention",
        qkv=falcon_qkv,
        output="dense",
    )
)
