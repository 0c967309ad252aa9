"""Inkling: a short convolution over time is between the attention and the residual stream."""

from dataclasses import replace

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

INKLING = Family(
    name="inkling",
    model_types=("inkling_text",),
    layers="layers",
    attention="self_attn",
    qkv=separate(query_beside=("r_proj",)),  # relative positions, computed from the hidden state
    output="o_proj",
    exit="attn_sconv",
)

register_family(INKLING)


def three_inputs(attention: nn.Module) -> dict[str, str]:
    """Refuse the pre-projection in full attention: there is no single x to replace."""
    if type(attention).__name__ != "Inkling2FullAttention":
        return {}
    return {"pre_projection": "queries, keys and values read three differently normed inputs in full attention"}


register_family(
    replace(
        INKLING,
        name="inkling2",
        model_types=("inkling2_text",),
        exit="post_attention_convolution",
        refusals=three_inputs,
    )
)
