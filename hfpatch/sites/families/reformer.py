"""Reformer: local attention has separate projections; LSH attention shares one for queries and keys."""

from typing import Any

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Projections, separate, whole
from hfpatch.sites.modules import has_module


def reformer_qkv(attention: nn.Module, config: Any) -> Projections:
    """Read the projections of local attention, or the value's of LSH attention."""
    if has_module(attention, "query_key"):
        return {"value": whole(attention, "value")}
    return separate(query="query", key="key", value="value")(attention, config)


register_family(
    Family(
        name="reformer",
        model_types=("reformer",),
        layers="encoder.layers",
        attention="attention.self_attention",
        qkv=reformer_qkv,
        output=None,
        exit="attention.output.dense",
        norm="attention.layer_norm",  # the cache stores this norm's output, not keys and values
        refusals={"stream": "the blocks are reversible: they pass two residual streams on"},
        input_gradients=True,  # the blocks are reversible: an autograd function of their own recomputes them
    )
)
