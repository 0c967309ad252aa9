"""Persimmon, also inside Fuyu: QKV fused and interleaved per head, queries and keys normed afterwards."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import per_head

register_family(
    Family(
        name="persimmon",
        model_types=("persimmon", "fuyu"),
        layers="layers",
        attention="self_attn",
        qkv=per_head("query_key_value"),
        output="dense",
    )
)
