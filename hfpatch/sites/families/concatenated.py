"""Families whose queries, keys and values are concatenated in one projection: [q all, k all, v all]."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import concatenated

FAMILIES = (
    # DBRX: norms and residual are in a wrapper; QKV concatenated, clamped afterwards
    Family(
        name="dbrx",
        model_types=("dbrx",),
        layers="blocks",
        attention="norm_attn_norm.attn",
        qkv=concatenated("Wqkv"),
        output="out_proj",
    ),
    # GPT and GPT-2: QKV concatenated in a Conv1D, whose weight is stored as (in, out)
    Family(
        name="gpt2",
        model_types=("gpt2", "gpt-sw3", "openai-gpt"),
        layers="h",
        attention="attn",
        qkv=concatenated("c_attn"),
        output="c_proj",
    ),
    # MPT: QKV concatenated, clamped afterwards where the config asks for it
    Family(
        name="mpt",
        model_types=("mpt",),
        layers="blocks",
        attention="attn",
        qkv=concatenated("Wqkv"),
        output="out_proj",
        refusals={"earlier": "its mask is True where others are False"},
    ),
    # Phi-3: QKV concatenated in one Linear, with grouped queries; also inside the multimodal Phi-4
    Family(
        name="phi3",
        model_types=("phi3", "phi4_multimodal"),
        layers="layers",
        attention="self_attn",
        qkv=concatenated("qkv_proj"),
        output="o_proj",
    ),
)

for family in FAMILIES:
    register_family(family)
