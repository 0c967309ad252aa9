"""DBRX: norms and residual are in a wrapper; QKV concatenated, clamped afterwards."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import concatenated

register_family(
    Family(
        name="dbrx",
        model_types=("dbrx",),
        layers="blocks",
        attention="norm_attn_norm.attn",
        qkv=concatenated("Wqkv"),
        output="out_proj",
    )
)
