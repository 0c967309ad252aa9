"""MPT: QKV concatenated, clamped afterwards where the config asks for it."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import concatenated

register_family(
    Family(
        name="mpt",
        model_types=("mpt",),
        layers="blocks",
        attention="attn",
        qkv=concatenated("Wqkv"),
        output="out_proj",
    )
)
