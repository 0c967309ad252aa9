"""GPT-J: separate projections, parallel residual."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="gptj",
        model_types=("gptj",),
        layers="transformer.h",
        attention="attn",
        qkv=separate(),
        output="out_proj",
    )
)
