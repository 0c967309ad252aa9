"""CodeGen: one projection in four groups of [q, v, k], the value before the key."""

from typing import Any

from torch import nn

from hfpatch.sites.columns import Columns
from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import Projection, Projections, divide, out_features

FUSED, GROUPS = "qkv_proj", 4  # the number of chips that the model was trained on, fixed in its code
ORDER = ("query", "value", "key")


def codegen_qkv(attention: nn.Module, config: Any) -> Projections:
    """Read the columns of the form four times [q, v, k]."""
    width = divide(out_features(attention, FUSED), GROUPS, FUSED)
    part = divide(width, len(ORDER), FUSED)
    return {t: Projection(FUSED, Columns(GROUPS, width, i * part, part)) for i, t in enumerate(ORDER)}


register_family(
    Family(
        name="codegen",
        model_types=("codegen",),
        layers="h",
        attention="attn",
        qkv=codegen_qkv,
        output="out_proj",
    )
)
