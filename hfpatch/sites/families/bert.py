"""BERT's blocks in models where their structure does not show the site.

The wrapper around the attention adds the residual and may hold the norm. The site is the inner module; the branch ends
at the wrapper's output projection, before residual and norm.
"""

from dataclasses import replace

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

# GIT: beside a vision tower, with nothing that tells that the text tower is the language model
BERT = Family(
    name="git",
    model_types=("git",),
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
