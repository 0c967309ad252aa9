"""Encoders whose attention cannot be read from its structure alone."""

from dataclasses import replace

from hfpatch.sites.families.bert import BERT
from hfpatch.sites.families.fused import FAMILIES as FUSED
from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import per_head, separate

RELATIVE = "the scores of relative positions are computed from it, too"

# DeBERTa: relative positions are projected by the matrices of queries and keys, or meet these in scores of their own
DEBERTA = replace(BERT, refusals={"query": RELATIVE, "key": RELATIVE, "temperature": RELATIVE})
register_family(replace(DEBERTA, name="deberta", model_types=("deberta",), qkv=per_head("in_proj")))
SEPARATE = separate(query="query_proj", key="key_proj", value="value_proj")
register_family(replace(DEBERTA, name="deberta-v2", model_types=("deberta-v2",), qkv=SEPARATE))
register_family(replace(DEBERTA, name="sew-d", model_types=("sew-d",), layers="encoder.encoder.layer", qkv=SEPARATE))

# ConvBERT: the query also makes the kernel of a convolution beside the attention
register_family(
    replace(
        BERT,
        name="convbert",
        model_types=("convbert",),
        refusals=dict.fromkeys(("query", "temperature"), "the kernel of a convolution is computed from it, too"),
    )
)

# CANINE: the attention takes what queries and what keys read apart, in pieces where it is local
register_family(
    replace(
        BERT,
        name="canine",
        model_types=("canine",),
        layers=("initial_char_encoder.layer", "encoder.layer", "final_char_encoder.layer"),
        entries=("query", "key", "value"),
        refusals={"content_skip": "local attention reads the sequence in pieces", "earlier": "it reads pieces"},
    )
)

# WavLM: torch's function for attention takes the weights of the projections, which are not called
NOT_CALLED = dict.fromkeys(
    ("query", "key", "value", "temperature", "mixed", "output"), "torch's own attention reads its weight without a call"
)
register_family(
    Family(
        name="wavlm",
        model_types=("wavlm",),
        layers="encoder.layers",
        attention="attention",
        qkv=separate(),
        output="out_proj",
        refusals=NOT_CALLED,
    )
)

# The blocks of GPT-2, with another model around them
GPT2 = next(family for family in FUSED if family.name == "gpt2")
register_family(replace(GPT2, name="decision_transformer", model_types=("decision_transformer",), layers="encoder.h"))
