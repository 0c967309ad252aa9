"""Where the attention branch of Sage is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hfpatch import Family
from hfpatch.sites import Columns, Projection


def reversed_columns(attention: nn.Module, config: Any) -> Mapping[str, Projection]:
    """Return the columns of the one projection: [v all, k all, q all]."""
    d = config.hidden_size
    starts = {"query": 2 * d, "key": d, "value": 0}
    return {target: Projection("joint", Columns(1, 3 * d, start, d)) for target, start in starts.items()}


def branch_scale(block: nn.Module) -> float:
    """Return what a block multiplies the branch with before it adds it to the residual stream."""
    return float(block.branch_scale)  # type: ignore[arg-type]


SAGE = Family(
    name="sage",
    model_types=("sage",),
    layers="layers",
    attention="attention",
    qkv=reversed_columns,
    output="out",
    factor=branch_scale,
)
