"""BLOOM: QKV fused and interleaved per head; the attention module adds the residual itself."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import per_head

register_family(
    Family(
        name="bloom",
        model_types=("bloom",),
        layers="h",
        attention="self_attention",
        qkv=per_head("query_key_value"),
        output="dense",
    )
)
