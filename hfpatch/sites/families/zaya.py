"""ZAYA: convolutions mix queries and keys, and the residual is scaled elementwise by a module of its own.

The branch ends at that module's output, which is the new residual stream.
"""

from typing import Any

from torch import nn

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Projections, whole

JOINED = "the module that the branch ends at adds it to the residual stream itself"
MIXED = "a convolution computes keys from queries too, so that a change of the query changes the key"


def zaya_qkv(attention: nn.Module, config: Any) -> Projections:
    """Read the projections; there are two for the value, of the current and of the delayed token."""
    return {target: whole(attention, f"qkv_proj.{target[0]}_proj") for target in ("query", "key")}


register_family(
    Family(
        name="zaya",
        model_types=("zaya",),
        layers="layers",
        attention="self_attn",
        qkv=zaya_qkv,
        output="o_proj",
        exit="post_attention_residual_scale",
        refusals={
            "query": MIXED,
            "key": MIXED,
            "value": "two projections compute it",
            "branch": JOINED,
            "earlier": "its attention takes several masks, one of them of a convolution",
        },
    )
)
