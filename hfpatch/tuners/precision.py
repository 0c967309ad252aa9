"""The dtype in which a method computes: that of its parts, whatever the model's is.

An export carries this code, so it knows nothing of PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def through(act: Callable[..., Any], parts: Mapping[str, Any], value: Tensor, *others: Any) -> Tensor:
    """Return ``act(parts, value, *others)``, computed in the dtype of the parts at least, in that of ``value``."""
    dtype = computed_in(parts)
    wide = value if dtype is None else value.to(torch.promote_types(dtype, value.dtype))
    changed: Tensor = act(parts, wide, *others)
    return changed.to(value.dtype)


def as_computed_by(parts: Mapping[str, Any], x: Tensor) -> Tensor:
    """Return x in the dtype of the parts."""
    return x.to(computed_in(parts) or x.dtype)


def computed_in(parts: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the parts, that of the first tensor of floats; None where they have none."""
    for module in parts.values():
        for parameter in module._parameters.values() or module.parameters():  # the latter takes microseconds
            if parameter is not None and parameter.is_floating_point():
                dtype: torch.dtype = parameter.dtype
                return dtype
    return None
