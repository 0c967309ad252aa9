"""Families with separate projections of queries, keys and values."""

import math
from dataclasses import replace
from operator import attrgetter

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import gated, separate

# Llama's names, from which the families below differ
LLAMA = Family(name="llama", model_types=(), layers="layers", attention="self_attn", qkv=separate(), output="o_proj")

FAMILIES = (
    # Beam: the branch is divided by the root of a number that counts the additions so far
    replace(
        LLAMA,
        name="beam",
        model_types=("beam",),
        exit="post_attention_layernorm",
        factor=lambda block: 1 / math.sqrt(attrgetter("attn_residual_add_idx")(block)),
    ),
    # BLT (Byte Latent Transformer): three towers of blocks, and cross-attention between them, which is not patched
    replace(
        LLAMA,
        name="blt",
        model_types=("blt",),
        layers=("local_encoder.layers", "global_transformer.layers", "local_decoder.layers"),
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
    replace(LLAMA, name="mimo_v2_flash", model_types=("mimo_v2_flash",)),
    # Dory: each block moves the residual stream towards its branch; those in the middle run in a loop
    replace(
        LLAMA,
        name="dory",
        model_types=("dory",),
        refusals={
            **dict.fromkeys(("content_skip", "branch"), "each feature of the branch is added by a share of its own"),
            "earlier": "some blocks run several times in a forward pass, each time with a cache of its own",
        },
    ),
    # Moshi: each projection is a linear layer inside a module of its own
    replace(LLAMA, name="moshi", model_types=("moshi",)),
    # ProphetNet: the main stream and the n-gram streams are concatenated along the sequence
    replace(
        LLAMA,
        name="prophetnet",
        model_types=("prophetnet",),
        qkv=separate(query="query_proj", key="key_proj", value="value_proj", query_beside=("relative_pos_embeddings",)),
        output="out_proj",
        refusals={
            "mixed": "the output projection is called twice, each time for other positions",
            "earlier": "several streams are concatenated along the sequence",
        },
    ),
    # Qwen 3-Next and 3.5, hybrids: the query's projection also computes a gate of the output, head by head
    replace(
        LLAMA,
        name="qwen3_next",
        model_types=("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        qkv=gated(),
        attention_classes=("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"),
    ),
    # RecurrentGemma: every third block holds attention where the others hold a linear recurrence
    replace(
        LLAMA,
        name="recurrent_gemma",
        model_types=("recurrent_gemma",),
        attention="temporal_block",
        attention_classes=("RecurrentGemmaAttention",),
    ),
    # HRM: two stacks of blocks, each run several times in a forward pass
    replace(
        LLAMA,
        name="hrm_text",
        model_types=("hrm_text",),
        layers=("L_module.layers", "H_module.layers"),
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
