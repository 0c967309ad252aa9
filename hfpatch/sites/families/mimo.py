"""MiMo V2 Flash: values have another head size than queries and keys, and there are learned sinks."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="mimo_v2_flash",
        model_types=("mimo_v2_flash",),
        layers="layers",
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
    )
)
