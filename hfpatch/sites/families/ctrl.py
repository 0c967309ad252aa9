"""CTRL: the attention takes its input three times, as value, key and query."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="ctrl",
        model_types=("ctrl",),
        layers="h",
        attention="multi_head_attention",
        qkv=separate(query="Wq", key="Wk", value="Wv"),
        output="dense",
    )
)
