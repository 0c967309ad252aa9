"""The loss on fixed blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hfpatch.data.blocks import IGNORE, TokenBlocks, collate
from hfpatch.support.modes import evaluating
from hfpatch.training.head import loss_in_forward

Row = dict[str, torch.Tensor]
_START_TOKENS, _START_BLOCKS = 16, 64  # tokens of each piece, which depend on how it begins; blocks for two means


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

    The model is a causal LM, a wrapped one within :func:`hfpatch.training.head.loss_in_forward`. A forward pass takes
    ``batch_size`` blocks, in the dtype ``autocast``. Of several ``processes`` each does equally many; ``add_up`` adds a
    tensor up over them.
    """
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad(), evaluating(model), loss_in_forward(model):
        for _, rows, batch in batches_of(blocks, batch_size, device, process, processes):
            with autocast_context(autocast, device):
                total += float(model(**batch, use_cache=False).loss)
            count += sum(int((row["labels"] != IGNORE).sum()) for row in rows)
    sums = torch.tensor([float(total), count], dtype=torch.float64, device=device)
    totals = add_up(sums) if add_up else sums
    return float(totals[0] / totals[1])


def document_losses(
    model: nn.Module,
    blocks: TokenBlocks,
    *,
    batch_size: int,
    autocast: str | None = None,
    process: int = 0,
    processes: int = 1,
    kinds: npt.NDArray[Any] | None = None,
) -> npt.NDArray[np.float64]:
    """Return this process's part of each document's loss; over all processes the ratio of the sums is `mean_loss`.

    .. math::
        loss_d = sum over the predicted tokens t of document d, in whichever rows they are, of -log p(t | row before t)

    A token belongs to the document that it is from (``blocks.owners``), also where the row began with another one; or
    to one of ``kinds`` (blocks, block_size), -1 where it does not count. The model is not wrapped; other arguments are
    those of `mean_loss`.

    Returns:
        (documents, 2) nats and predicted tokens of each document, or of each kind.
    """
    assert blocks.owners is not None  # they are kept of text to measure
    kinds = blocks.owners if kinds is None else kinds
    device, sums = next(model.parameters()).device, np.zeros((int(kinds.max()) + 1, 2))
    with torch.no_grad(), evaluating(model), loss_in_forward(model, by_token=True):
        for start, rows, batch in batches_of(blocks, batch_size, device, process, processes):
            with autocast_context(autocast, device):
                losses = model(**batch, use_cache=False).loss[:, :-1]  # (batch, seq - 1), at the place before the token
            predicted = torch.stack([row["labels"] for row in rows])[:, 1:].numpy() != IGNORE
            kind = kinds[start : start + len(rows), 1:]
            if predicted.any():
                counted = predicted & (kind >= 0)
                values = losses.double().cpu().numpy()[counted]
                np.add.at(sums, kind[counted], np.stack([values, np.ones_like(values)], axis=1))
    return sums


def start_losses(model: nn.Module, blocks: TokenBlocks, **passes: Any) -> npt.NDArray[np.float64]:
    """Return this process's part of the losses where documents begin, and where blocks begin inside a document.

    Of each piece the first 16 predicted tokens count, in the first 64 blocks. Arguments are those of `document_losses`.

    Returns:
        (2, 2) nats and predicted tokens, of documents' first pieces and of the later ones.
    """
    blocks = blocks.head(_START_BLOCKS)
    assert blocks.owners is not None  # they are kept of text to measure
    kinds = np.full(blocks.owners.shape, -1)  # 0 in first pieces, 1 in later ones, -1 where a token does not count
    begun = set[int]()
    for index, (owners, row) in enumerate(zip(blocks.owners, kinds, strict=True)):
        predicted = blocks[index]["labels"].numpy() != IGNORE
        for start, stop in pairwise([0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]):
            counted = start + np.flatnonzero(predicted[start:stop])[:_START_TOKENS]
            row[counted] = int(owners[start]) in begun
            begun.add(int(owners[start]))
    sums = document_losses(model, blocks, kinds=kinds, **passes)
    return np.concatenate([sums, np.zeros((2 - len(sums), 2))])  # there may be no later pieces


def batches_of(
    blocks: TokenBlocks, size: int, device: torch.device, process: int = 0, processes: int = 1
) -> Iterator[tuple[int, list[Row], Row]]:
    """Yield a process's batches: the index of the first block, the blocks, and these as one batch on the device.

    All processes have equally many; one beyond the last block is a block that predicts nothing.
    """
    for first in range(0, len(blocks), size * processes):
        start = first + process * size
        rows = [blocks[index] for index in range(start, min(start + size, len(blocks)))]
        if not rows:
            spare = blocks[0]
            rows = [{**spare, "labels": torch.full_like(spare["labels"], IGNORE)}]
        yield start, rows, {name: value.to(device) for name, value in collate(rows).items()}
