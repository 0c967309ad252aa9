"""Families with separate projections of queries, keys and values, at paths of their own."""

import math
from operator import attrgetter

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import gated, separate

FAMILIES = (
    # Beam: the branch is divided by the root of a number that counts the additions so far
    Family(
        name="beam",
        model_types=("beam",),
        layers="layers",
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
        exit="post_attention_layernorm",
        factor=lambda block: 1 / math.sqrt(attrgetter("attn_residual_add_idx")(block)),
    ),
    # BLT (Byte Latent Transformer): three towers of blocks, and cross-attention between them, which is not patched
    Family(
        name="blt",
        model_types=("blt",),
        layers=("local_encoder.layers", "global_transformer.layers", "local_decoder.layers"),
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
        refusals={"earlier": "its blocks read patches of different lengths beside the bytes"},
    ),
    # CPM-Ant: norm and residual are in a wrapper; the attention takes its input twice, for queries and for keys
    Family(
        name="cpmant",
        model_types=("cpmant",),
        layers="encoder.layers",
        attention="self_att.self_attention",
        qkv=separate(query="project_q", key="project_k", value="project_v"),
        output="attention_out",
        refusals={"earlier": "its prompt tokens see the whole text, not only the past"},
    ),
    # CTRL: the attention takes its input three times, as value, key and query
    Family(
        name="ctrl",
        model_types=("ctrl",),
        layers="h",
        attention="multi_head_attention",
        qkv=separate(query="Wq", key="Wk", value="Wv"),
        output="dense",
    ),
    # MiMo V2 Flash: values have another head size than queries and keys, and there are learned sinks
    Family(
        name="mimo_v2_flash",
        model_types=("mimo_v2_flash",),
        layers="layers",
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
    ),
    # Dory: each block moves the residual stream towards its branch; those in the middle run in a loop
    Family(
        name="dory",
        model_types=("dory",),
        layers="layers",
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
        refusals={
            **dict.fromkeys(("content_skip", "branch"), "each feature of the branch is added by a share of its own"),
            "earlier": "some blocks run several times in a forward pass, each time with a cache of its own",
        },
    ),
    # Moshi: each projection is a linear layer inside a module of its own
    Family(
        name="moshi",
        model_types=("moshi",),
        layers="layers",
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
    ),
    # ProphetNet: the main stream and the n-gram streams are concatenated along the sequence
    Family(
        name="prophetnet",
        model_types=("prophetnet",),
        layers="layers",
        attention="self_attn",
        qkv=separate(query="query_proj", key="key_proj", value="value_proj", query_beside=("relative_pos_embeddings",)),
        output="out_proj",
        refusals={
            "mixed": "the output projection is called twice, each time for other positions",
            "earlier": "several streams are concatenated along the sequence",
        },
    ),
    # Qwen 3-Next and 3.5, hybrids: the query's projection also computes a gate of the output, head by head
    Family(
        name="qwen3_next",
        model_types=("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        layers="layers",
        attention="self_attn",
        qkv=gated(),
        output="o_proj",
        attention_classes=("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"),
    ),
    # RecurrentGemma: every third block holds attention where the others hold a linear recurrence
    Family(
        name="recurrent_gemma",
        model_types=("recurrent_gemma",),
        layers="layers",
        attention="temporal_block",
        qkv=separate(),
        output="o_proj",
        attention_classes=("RecurrentGemmaAttention",),
    ),
    # HRM: two stacks of blocks, each run several times in a forward pass
    Family(
        name="hrm_text",
        model_types=("hrm_text",),
        layers=("L_module.layers", "H_module.layers"),
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
        refusals={"earlier": "a block runs several times in a forward pass, each with a cache of its own"},
    ),
    # XLM and FlauBERT: no blocks, but parallel lists of attentions, norms and feed-forward layers
    Family(
        name="xlm",
        model_types=("xlm", "flaubert"),
        layers="attentions",
        attention="",
        qkv=separate(query="q_lin", key="k_lin", value="v_lin"),
        output="out_lin",
    ),
)

for family in FAMILIES:
    register_family(family)
