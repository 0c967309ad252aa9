"""Output columns of a projection that tensor parallelism has shared out among processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError


def on_all_columns(module: nn.Module, output: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``change(output)`` as if all columns of a projection were here, for the columns that are.

    In tensor parallelism each process has some rows of the projection's weight W (out, in), one block after the other,
    and so some columns of its output; what enters the projection is the same everywhere. ``change`` must treat the
    columns of its argument one by one: those of other processes are zeros.

    Args:
        module: the projection.
        output: what it returned here, ``(..., out)`` or ``(..., out / processes)``.
        change: maps ``(..., out)`` to ``(..., out)``.

    Raises:
        HfpatchError: if the columns of a process are not one block.
    """
    weight: Any = getattr(module, "weight", None)
    places = [(dim, place) for dim, place in enumerate(getattr(weight, "placements", ())) if place.is_shard()]
    width = output.shape[-1]
    if not places or width == weight.shape[0]:
        return change(output)
    ((dim, place),) = places
    if hasattr(place, "split_factor"):
        raise HfpatchError(
            "tensor parallelism packs the columns of this model's query projection; evaluate it without --tp"
        )
    start = weight.device_mesh.get_local_rank(dim) * width
    return change(F.pad(output, (start, weight.shape[0] - start - width)))[..., start : start + width]
