"""Blocks to a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def collate(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows of (block_size,) to (batch, block_size).

    Position ids that only count up from zero, and masks without padding, are a model's defaults; without them it takes
    its fast causal path.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    positions = batch.get("position_ids")
    if positions is not None and bool((positions[:, -1] == positions.shape[1] - 1).all()):
        del batch["position_ids"]
    mask = batch.get("attention_mask")
    if mask is not None and bool(mask.all()):
        del batch["attention_mask"]
    return batch
