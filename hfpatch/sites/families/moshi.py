"""Moshi: each projection is a linear layer inside a module of its own."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="moshi",
        model_types=("moshi",),
        layers="layers",
        attention="self_attn",
        qkv=separate(query="q_proj.linear", key="k_proj.linear", value="v_proj.linear"),
        output="o_proj.linear",
    )
)
