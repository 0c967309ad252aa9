"""Qwen 3-Next and 3.5: the query projection also computes a gate of the output, head by head, in hybrid models."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import gated

register_family(
    Family(
        name="qwen3_next",
        model_types=("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        layers="layers",
        attention="self_attn",
        qkv=gated(),
        output="o_proj",
        attention_classes=("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"),
    )
)
