"""The loss on fixed blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from hfpatch.data.blocks import IGNORE, TokenBlocks
from hfpatch.data.collate import collate
from hfpatch.support.modes import evaluating
from hfpatch.training.head import loss_in_forward

Rows = list[dict[str, torch.Tensor]]


def autocast_context(dtype: str | None, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of the forward pass: autocast to ``dtype``, or nothing for None."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))


def mean_loss(
    model: nn.Module,
    blocks: TokenBlocks,
    *,
    batch_size: int,
    autocast: str | None = None,
    process: int = 0,
    processes: int = 1,
    add_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> float:
    """Return nats per predicted token over all blocks, each token weighing the same; the model is left in its mode.

    Args:
        model: a causal LM, wrapped or not; a wrapped one within :func:`hfpatch.training.head.loss_in_forward`.
        blocks: the blocks.
        batch_size: blocks in one forward pass.
        autocast: the forward pass's autocast dtype.
        process: this process's number.
        processes: how many processes share the work; each does equally many forward passes.
        add_up: adds a tensor up over the processes.
    """
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64), 0
    stride = batch_size * processes
    with torch.no_grad(), evaluating(model), loss_in_forward(model):
        for first in range(0, len(blocks), stride):
            rows, predicted = _rows(blocks, first + process * batch_size, batch_size)
            batch = {name: value.to(device) for name, value in collate(rows).items()}
            with autocast_context(autocast, device):
                total += float(model(**batch, use_cache=False).loss)
            count += predicted
    sums = torch.tensor([float(total), count], dtype=torch.float64, device=device)
    found = add_up(sums) if add_up else sums
    return float(found[0] / found[1])


def _rows(blocks: TokenBlocks, start: int, size: int) -> tuple[Rows, int]:
    """Return up to ``size`` blocks and their predicted tokens; beyond the end one block that predicts nothing."""
    rows = [blocks[index] for index in range(start, min(start + size, len(blocks)))]
    if not rows:
        spare = blocks[0]
        rows = [{**spare, "labels": torch.full_like(spare["labels"], IGNORE)}]
    return rows, sum(int((row["labels"] != IGNORE).sum()) for row in rows)
