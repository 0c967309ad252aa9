"""Families with one projection whose columns are, for each head, [q, k, v]."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import per_head

FAMILIES = (
    # BLOOM: QKV fused and interleaved per head; the attention module adds the residual itself
    Family(
        name="bloom",
        model_types=("bloom",),
        layers="h",
        attention="self_attention",
        qkv=per_head("query_key_value"),
        output="dense",
        refusals={"branch": "the attention returns its branch and the residual stream in one sum"},
    ),
    # GPT-NeoX and Pythia: QKV fused and interleaved per head, parallel residual
    Family(
        name="gpt-neox",
        model_types=("gpt_neox", "gpt_neox_japanese"),
        layers="layers",
        attention="attention",
        qkv=per_head("query_key_value"),
        output="dense",
    ),
    # Persimmon, also inside Fuyu: QKV fused and interleaved per head, queries and keys normed afterwards
    Family(
        name="persimmon",
        model_types=("persimmon", "fuyu"),
        layers="layers",
        attention="self_attn",
        qkv=per_head("query_key_value"),
        output="dense",
    ),
)

for family in FAMILIES:
    register_family(family)
