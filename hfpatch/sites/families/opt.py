"""OPT: separate projections below ``model.decoder``."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="opt",
        model_types=("opt",),
        layers="model.decoder.layers",
        attention="self_attn",
        qkv=separate(),
        output="out_proj",
    )
)
