"""The loss: every token of a step weighs the same, whatever micro-batch it came in."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy, pad

from hfpatch.data.blocks import IGNORE


def token_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the sum of the tokens' cross-entropies in nats, divided by the tokens of the whole step.

    Args:
        outputs: what a causal LM returns; ``logits`` are (batch, seq, vocab).
        labels: (batch, seq) token ids, unshifted; -100 is not predicted.
        num_items_in_batch: predicted tokens in the whole step, all micro-batches and processes together; None takes
            this batch's own.
    """
    targets = pad(labels, (0, 1), value=IGNORE)[:, 1:].flatten()
    logits = outputs.logits.flatten(0, 1).float()
    count = (targets != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
    return cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / count
