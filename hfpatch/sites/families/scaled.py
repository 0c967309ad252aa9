"""Blocks that multiply the branch by a known factor before they add it; see also granite's residual_multiplier.

The content skip is divided by that factor, so that it reaches the residual stream itself.
"""

import math
from dataclasses import replace
from operator import attrgetter

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

SCALED = Family(
    name="falcon_h1",
    model_types=("falcon_h1",),
    layers="layers",
    attention="self_attn",
    qkv=separate(),
    output="o_proj",
    factor=attrgetter("attn_out_multiplier"),
)

register_family(SCALED)
register_family(
    replace(
        SCALED,
        name="beam",
        model_types=("beam",),
        exit="post_attention_layernorm",
        factor=lambda block: 1 / math.sqrt(attrgetter("attn_residual_add_idx")(block)),  # counts the additions so far
    )
)
register_family(
    replace(
        SCALED,
        name="hyperclovax",
        model_types=("hyperclovax",),
        exit="post_norm1",
        factor=attrgetter("residual_multiplier"),
    )
)
register_family(
    replace(
        SCALED,
        name="minimax",
        model_types=("minimax",),
        factor=attrgetter("attn_beta_factor"),
        attention_classes=("MiniMaxAttention",),
    )
)
