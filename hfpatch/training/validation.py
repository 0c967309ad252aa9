"""The loss on fixed blocks."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hfpatch.data.blocks import IGNORE, TokenBlocks
from hfpatch.data.collate import collate
from hfpatch.training.loss import token_loss
from hfpatch.training.precision import autocast_context


@torch.no_grad()
def mean_loss(model: PreTrainedModel, blocks: TokenBlocks, *, batch_size: int, autocast: str | None = None) -> float:
    """Return nats per predicted token over all blocks, each token weighing the same; the model is left in its mode."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(blocks), batch_size):
        rows = range(start, min(start + batch_size, len(blocks)))
        batch = {name: value.to(model.device) for name, value in collate([blocks[row] for row in rows]).items()}
        labels = batch.pop("labels")
        with autocast_context(autocast, model.device):
            outputs = model(**batch, use_cache=False)
        total += float(token_loss(outputs, labels, num_items_in_batch=1))
        count += int((labels[:, 1:] != IGNORE).sum())
    model.train(training)
    return total / count
