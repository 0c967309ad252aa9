"""Inkling: a short convolution over time stands between the attention and the residual stream."""

from dataclasses import replace

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

INKLING = Family(
    name="inkling",
    model_types=("inkling_text",),
    layers="layers",
    attention="self_attn",
    qkv=separate(),
    output="o_proj",
    exit="attn_sconv",
)

register_family(INKLING)

# Full-attention layers are left out: their queries, keys and values read three differently normed inputs, so that
# there is no single x to replace.
register_family(
    replace(
        INKLING,
        name="inkling2",
        model_types=("inkling2_text",),
        exit="post_attention_convolution",
        attention_classes=("Inkling2SlidingAttention",),
    )
)
