"""Phi-3: QKV concatenated in one Linear, with grouped queries; also inside the multimodal Phi-4."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import concatenated

register_family(
    Family(
        name="phi3",
        model_types=("phi3", "phi4_multimodal"),
        layers="layers",
        attention="self_attn",
        qkv=concatenated("qkv_proj"),
        output="o_proj",
    )
)
