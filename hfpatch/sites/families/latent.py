"""Multi-head latent attention in blocks whose structure is ambiguous."""

from dataclasses import replace
from typing import Any

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Columns, Projection, Projections, divide, head_counts, latent, out_features


def query_and_gate(attention: nn.Module, config: Any) -> Projections:
    """Read the query of a projection that also computes, for every head, a gate of its output, as wide as a value."""
    path, heads = "q_gate_proj", head_counts(config)[0]
    width = divide(out_features(attention, path), heads, path)
    return {"query": Projection(path, Columns(heads, width, 0, width - int(config.v_head_dim)), source="q_a_proj")}


LONGCAT = Family(
    name="longcat_flash",
    model_types=("longcat_flash",),
    layers="layers",
    attention=("self_attn.0", "self_attn.1"),
    qkv=latent,
    output="o_proj",
)

register_family(LONGCAT)
register_family(replace(LONGCAT, name="axk2", model_types=("axk2",), attention="self_attn", qkv=query_and_gate))
register_family(
    replace(
        LONGCAT,
        name="kimi_linear",
        model_types=("kimi_linear",),
        attention="self_attn",
        attention_classes=("KimiLinearAttention",),  # the others are KimiLinearDeltaAttention, at the same path
    )
)
