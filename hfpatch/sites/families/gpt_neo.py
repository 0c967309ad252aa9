"""GPT-Neo: global and local attention in a wrapper of one module."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="gpt_neo",
        model_types=("gpt_neo",),
        layers="h",
        attention="attn.attention",
        qkv=separate(),
        output="out_proj",
    )
)
