"""Inkling: a short convolution over time is between the attention and the residual stream."""

from dataclasses import replace
from typing import Any

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Projections, separate
from hfpatch.sites.modules import has_module

INKLING = Family(
    name="inkling",
    model_types=("inkling_text",),
    layers="layers",
    attention="self_attn",
    qkv=separate(query_beside=("r_proj",)),  # relative positions, computed from the hidden state
    output="o_proj",
    exit="attn_sconv",
)
THREE_INPUTS = "queries, keys and values read three differently normed inputs in full attention"
MESSAGES = "in a loop queries, keys and values read three inputs, each with a message of the pass before"
SEVERAL_PASSES = "some blocks run several times in a forward pass, each time with a cache of its own"


def inkling2_qkv(attention: nn.Module, config: Any) -> Projections:
    """Read the projections; from transformers 5.24 on each is in a module with its norm."""
    if has_module(attention, "r_proj"):
        return INKLING.qkv(attention, config)
    return separate(query_beside=("relative_position_bias.linear",))(attention, config)


def three_inputs(attention: nn.Module) -> dict[str, str]:
    """Refuse the pre-projection in full attention: there is no single x to replace."""
    return {"pre_projection": THREE_INPUTS} if type(attention).__name__.endswith("FullAttention") else {}


def several_passes(attention: Any) -> dict[str, str]:
    """Refuse the pre-projection in blocks that run in a loop, too."""
    config = attention.config
    looped = config.loop_layer_index_start <= attention.layer_idx < config.loop_layer_index_end
    return ({"pre_projection": MESSAGES} if looped else three_inputs(attention)) | {"earlier": SEVERAL_PASSES}


INKLING2 = replace(
    INKLING,
    name="inkling2",
    model_types=("inkling2_text",),
    qkv=inkling2_qkv,
    exit="post_attention_convolution",
    refusals=three_inputs,
)
register_family(INKLING)
register_family(INKLING2)
register_family(replace(INKLING2, name="inkling2_loop", model_types=("inkling2_loop_text",), refusals=several_passes))
