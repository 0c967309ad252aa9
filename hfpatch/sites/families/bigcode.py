"""GPT-BigCode (StarCoder): one key and value for all heads, or QKV per head; a switch of the config decides."""

from typing import Any

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Projections, concatenated_columns, grouped_columns, head_counts

FUSED = "c_attn"


def bigcode_qkv(attention: nn.Module, config: Any) -> Projections:
    """Read the layout that ``multi_query`` asks for."""
    heads, _ = head_counts(config)
    if config.multi_query:
        return concatenated_columns(attention, FUSED, heads=heads, kv_heads=1)
    return grouped_columns(attention, FUSED, heads=heads, groups=heads)


register_family(
    Family(
        name="gpt_bigcode",
        model_types=("gpt_bigcode",),
        layers="h",
        attention="attn",
        qkv=bigcode_qkv,
        output="c_proj",
    )
)
