"""GPT-NeoX and Pythia: QKV fused and interleaved per head, parallel residual."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import per_head

register_family(
    Family(
        name="gpt-neox",
        model_types=("gpt_neox", "gpt_neox_japanese"),
        layers="layers",
        attention="attention",
        qkv=per_head("query_key_value"),
        output="dense",
    )
)
