"""Families whose queries, keys and values come from one projection; the layouts differ, some by the config."""

from functools import partial
from typing import Any

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import (
    Projections,
    concatenated,
    concatenated_columns,
    equal_parts,
    grouped_columns,
    per_head,
)


def multi_query(attention: nn.Module, config: Any, path: str) -> Projections:
    """Read the form that switches of the config choose.

    Per key/value group (Falcon's new decoder), one key and value for all heads (multi-query), or per head.
    """
    if getattr(config, "new_decoder_architecture", False):
        return grouped_columns(attention, config, path, config.num_kv_heads)
    if config.multi_query:
        return concatenated_columns(attention, config, path, kv_heads=1)
    return grouped_columns(attention, config, path)


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
        model_types=("gpt2", "gpt-sw3", "imagegpt", "openai-gpt"),
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
    # BLOOM: QKV fused and interleaved per head; the attention module adds the residual itself
    Family(
        name="bloom",
        model_types=("bloom",),
        layers="h",
        attention="self_attention",
        qkv=per_head("query_key_value"),
        output="dense",
        refusals={"branch": "the attention returns its branch and the residual stream in one sum"},
    ),
    # GPT-NeoX and Pythia: QKV fused and interleaved per head, parallel residual
    Family(
        name="gpt-neox",
        model_types=("gpt_neox", "gpt_neox_japanese"),
        layers="layers",
        attention="attention",
        qkv=per_head("query_key_value"),
        output="dense",
    ),
    # Persimmon, also inside Fuyu: QKV fused and interleaved per head, queries and keys normed afterwards
    Family(
        name="persimmon",
        model_types=("persimmon", "fuyu"),
        layers="layers",
        attention="self_attn",
        qkv=per_head("query_key_value"),
        output="dense",
    ),
    # Falcon: two switches of the config decide the layout
    Family(
        name="falcon",
        model_types=("falcon",),
        layers="h",
        attention="self_attention",
        qkv=partial(multi_query, path="query_key_value"),
        output="dense",
    ),
    # GPT-BigCode (StarCoder): one key and value for all heads, or QKV per head
    Family(
        name="gpt_bigcode",
        model_types=("gpt_bigcode",),
        layers="h",
        attention="attn",
        qkv=partial(multi_query, path="c_attn"),
        output="c_proj",
    ),
    # CodeGen: four groups, the number of chips that it was trained on, with the value before the key
    Family(
        name="codegen",
        model_types=("codegen",),
        layers="h",
        attention="attn",
        qkv=equal_parts("qkv_proj", order=("query", "value", "key"), groups=4),
        output="out_proj",
    ),
    # JetMoE: a mixture of attention heads; each token's queries are computed by the experts it is sent to
    Family(
        name="jetmoe",
        model_types=("jetmoe",),
        layers="layers",
        attention="self_attention",
        qkv=equal_parts("kv_proj", order=("key", "value")),
        output=None,
        refusals={"query": "queries are computed by a mixture of experts, not by one projection"},
    ),
)

for family in FAMILIES:
    register_family(family)
