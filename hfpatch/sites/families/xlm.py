"""XLM: no blocks, but parallel lists of attentions, norms and feed-forward layers."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="xlm",
        model_types=("xlm",),
        layers="attentions",
        attention="",
        qkv=separate(query="q_lin", key="k_lin", value="v_lin"),
        output="out_lin",
    )
)
