"""Zamba: a shared block of attention and MLP, whose output feeds the Mamba layer instead of the residual stream."""

from dataclasses import replace

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

ZAMBA = Family(
    name="zamba",
    model_types=("zamba",),
    layers="layers",
    attention="shared_transf.self_attn",
    qkv=separate(),
    output="o_proj",
    host="",  # the shared blocks are tied: what stood below them would become one parameter
    attention_classes=("ZambaAttention",),
    refusals={"content_skip": "the branch feeds the input of a Mamba layer, not the residual stream"},
)

register_family(ZAMBA)
register_family(
    replace(
        ZAMBA,
        name="zamba2",
        model_types=("zamba2",),
        attention="shared_transformer.self_attn",
        attention_classes=("Zamba2Attention",),
    )
)
