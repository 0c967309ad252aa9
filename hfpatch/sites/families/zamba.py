"""Zamba: a shared block of attention and MLP, whose output feeds the Mamba layer instead of the residual stream."""

from dataclasses import replace
from typing import Any

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Projections, separate


def adapted_qkv(attention: nn.Module, config: Any) -> Projections:
    """Read the projections, which the layers share, and the adapters of each layer."""
    projections = separate()(attention, config)
    if not config.use_shared_attention_adapter:
        return projections
    adapted = {}
    for target, projection in projections.items():
        path = f"linear_{target[0]}_adapter_list"
        adapters = attention.get_submodule(path).named_children()
        used = tuple(f"{path}.{name}" for name, adapter in adapters if not isinstance(adapter, nn.Identity))
        adapted[target] = replace(projection, beside=used)
    return adapted


ZAMBA = Family(
    name="zamba",
    model_types=("zamba",),
    layers="layers",
    attention="shared_transf.self_attn",
    qkv=separate(),
    output="o_proj",
    host="",  # the shared blocks are tied: modules below them would share their parameters
    attention_classes=("ZambaAttention",),
    refusals={"content_skip": "the branch feeds the input of a Mamba layer, not the residual stream"},
)

register_family(ZAMBA)
register_family(
    replace(
        ZAMBA,
        name="zamba2",
        model_types=("zamba2",),
        attention="shared_transformer.self_attn",
        qkv=adapted_qkv,
        attention_classes=("Zamba2Attention",),
    )
)
