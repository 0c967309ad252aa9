"""Gemma 3n and 4: the last layers read keys and values of earlier ones and project queries only.

The branch is normed again before it joins the residual stream; Gemma 3n then divides their sum by √2.
"""

import math
from dataclasses import replace

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate
from hfpatch.sites.modules import has_module


def one_for_both(attention: nn.Module) -> dict[str, str]:
    """Refuse a change of the key where its projection computes the value as well."""
    if has_module(attention, "v_proj") or not has_module(attention, "k_proj"):
        return {}
    return {"key": "its projection computes the value as well"}


GEMMA4 = Family(
    name="gemma4",
    model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    layers="layers",
    attention="self_attn",
    qkv=separate(shared=True),
    output="o_proj",
    exit="post_attention_layernorm",
    refusals=one_for_both,
)

register_family(GEMMA4)
register_family(
    replace(
        GEMMA4,
        name="gemma3n",
        model_types=("gemma3n", "gemma3n_text"),
        factor=lambda block: 1 / math.sqrt(2),
        refusals={"stream": "the blocks pass several residual streams on"},
    )
)
