"""BERT-like models, used as decoders: the wrapper around the attention adds the residual and may hold the norm.

The site is the inner module; the branch ends at the wrapper's output projection, before residual and norm.
"""

from dataclasses import replace

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

BERT = Family(
    name="bert",
    model_types=(
        "bert",
        "bert-generation",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "git",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ),
    layers="encoder.layer",
    attention="attention.self",
    qkv=separate(query="query", key="key", value="value"),
    output=None,
    exit="attention.output.dense",
)

register_family(BERT)

# The first short batch exchanges attention.self for another class; only its three projections stay.
register_family(
    replace(
        BERT,
        name="big_bird",
        model_types=("big_bird",),
        attention="attention",
        qkv=separate(query="self.query", key="self.key", value="self.value"),
        entries=("self.query", "self.key", "self.value"),
    )
)
