"""Compare the predictions of the base and of the patched model on a text, token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hfpatch.data.blocks import IGNORE, TokenBlocks
from hfpatch.nn.matmul import linear
from hfpatch.nn.softmax import RunningSoftmax
from hfpatch.sites.lm_head import LMHead, find_lm_head
from hfpatch.sites.modules import base_model
from hfpatch.support.modes import evaluating, keeping_flags
from hfpatch.training.head import is_plain
from hfpatch.training.loss import shifted
from hfpatch.training.validation import autocast_context, batches_of
from hfpatch.tuners.adapters import AdapterWrapper, adapters_disabled

_TILES = {"cpu": (512, 2048), "cuda": (4096, 8192)}
"""Rows, and tokens of the vocabulary, of the logits that are computed at once: 4 MiB on CPUs, 128 on GPUs."""

Both = tuple[Tensor, Tensor]
"""The same tensor of the base and of the patched model."""
Logits = Callable[[Tensor, slice], Tensor]
"""From some rows and a part of the vocabulary to the logits (rows, tokens) in fp32, which may be overwritten."""


class Change(NamedTuple):
    """The cross-entropies and KL(base ‖ patched) in nats at each predicted token, all (tokens,) in fp64.

    ``agrees`` is 1 where the same token is the most likely one in both models, else 0.
    """

    base: Tensor
    patched: Tensor
    kl: Tensor
    agrees: Tensor


def compare_logits(both: Both, logits: Logits, targets: Tensor, vocabulary: int) -> Change:
    """Compare two models' predictions from rows of both, one tile of rows and vocabulary at a time.

    With a and b the logits of the base and the patched model, over the tokens v so far as in `RunningSoftmax`:

    .. math::
        s = sum_v exp(a_v - m)                             t = sum_v exp(a_v - m) (a_v - b_v)
        KL = t / s - (m + log s) + (n + log sum_v exp(b_v - n))

    where m and n are the largest logits; where m grows, s and t shrink in proportion. The sums are fp64. ``targets``
    (tokens,) are the ids that are predicted, of a ``vocabulary`` of so many tokens.
    """
    rows, width = _TILES.get(targets.device.type, _TILES["cuda"])
    changes = []
    for first in range(0, len(targets), rows):
        part = slice(first, min(first + rows, len(targets)))
        base, patched = _Predictions(targets[part]), _Predictions(targets[part])
        apart = torch.zeros(part.stop - part.start, dtype=torch.float64, device=targets.device)
        for start in range(0, vocabulary, width):
            tokens = slice(start, min(start + width, vocabulary))
            a, b = logits(both[0][part], tokens), logits(both[1][part], tokens)
            difference = a - b
            shares, shrink = base.add(start, a)
            patched.add(start, b)
            distance = torch.where(shares > 0, shares * difference, 0.0)
            apart = apart * shrink + distance.sum(1, dtype=torch.float64)
        kl = apart / base.softmax.total - base.softmax.logsumexp + patched.softmax.logsumexp
        agrees = (base.best == patched.best).double()
        changes.append(Change(base.loss, patched.loss, kl.clamp(min=0.0), agrees))
    return Change(*(torch.cat(parts) for parts in zip(*changes, strict=True)))


class _Predictions:
    """The softmax, the target's logit and the most likely token of some rows, from one slice after the other."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.softmax = RunningSoftmax(len(targets), targets.device, torch.float64)
        self.score, self.best = torch.zeros_like(self.softmax.top), torch.zeros_like(targets)

    def add(self, start: int, logits: Tensor) -> Both:
        """Add a slice (rows, tokens), which is overwritten; return what `RunningSoftmax.add` does."""
        at = self.targets - start
        here = (at >= 0) & (at < logits.shape[1])
        score = logits.gather(1, at.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
        self.score = torch.where(here, score, self.score)
        peak, index = logits.max(1)
        self.best = torch.where(peak > self.softmax.top, index + start, self.best)
        return self.softmax.add(logits, peak)

    @property
    def loss(self) -> Tensor:
        return self.softmax.logsumexp - self.score.double()


def document_changes(
    model: nn.Module,
    blocks: TokenBlocks,
    *,
    batch_size: int,
    autocast: str | None = None,
    process: int = 0,
    processes: int = 1,
) -> npt.NDArray[np.float64]:
    """Return this process's part of each document's `Change`, in one pass over the text with the patch on and off.

    One tile of logits is in memory at a time, see `compare_logits`. A model without a plain head, with a scale and a
    soft cap at most (:func:`hfpatch.sites.lm_head.find_lm_head`), computes its own logits, of one block at a time.

    The model has adapters and is not wrapped; without adapters it is the base, which changes nothing. Other arguments
    are those of :func:`hfpatch.training.validation.mean_loss`.

    Returns:
        (documents, 5): predicted tokens of each document, and over them the sums of the base's nats, the patched
        model's nats, the KL in nats and the agreements.
    """
    assert blocks.owners is not None  # they are kept of text to measure
    causal: Any = base_model(model)
    head = find_lm_head(causal)
    head = head if head is not None and is_plain(head.head) else None
    adapters = [module for module in causal.modules() if isinstance(module, AdapterWrapper)]
    size = batch_size if head is not None else 1
    device = next(model.parameters()).device
    sums = np.zeros((int(blocks.owners.max()) + 1, 5))
    with torch.no_grad(), evaluating(model):
        for start, rows, batch in batches_of(blocks, size, device, process, processes):
            targets = shifted(batch.pop("labels"))
            kept = (targets != IGNORE).nonzero().squeeze(1)
            with autocast_context(autocast, device):
                base = patched = _rows(causal, head, batch)
                if adapters:
                    with keeping_flags(causal), adapters_disabled(adapters):
                        base = _rows(causal, head, batch)
            if not len(kept):
                continue
            taken = base[kept.to(base.device)], patched[kept.to(patched.device)]
            vocabulary = taken[0].shape[1] if head is None else len(head.head.weight)
            logits = partial(_logits, head, autocast)
            change = compare_logits(taken, logits, targets[kept].to(taken[0].device), vocabulary)
            predicted = torch.stack([row["labels"] for row in rows])[:, 1:].numpy() != IGNORE
            owners = blocks.owners[start : start + len(rows), 1:][predicted]
            values = np.stack([np.ones(len(owners)), *(measure.cpu().numpy() for measure in change)], axis=1)
            np.add.at(sums, owners, values)
    return sums


def _rows(model: Any, head: LMHead | None, batch: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states (batch · seq, hidden), or without a plain head the logits."""
    rows: Tensor = model(**batch, use_cache=False).logits if head is None else head.body(**batch, use_cache=False)[0]
    return rows.flatten(0, 1)


def _logits(head: LMHead | None, autocast: str | None, rows: Tensor, tokens: slice) -> Tensor:
    """Return the logits of some tokens: a slice of the logits, or products with a slice of the head."""
    if head is None:
        return rows[:, tokens].to(torch.float32, copy=True)  # not a view, which would be overwritten
    weight, bias = head.head.weight, head.head.bias
    dtype = weight.dtype if autocast is None else getattr(torch, autocast)
    part = None if bias is None else bias[tokens].to(dtype)
    return head.tail(linear(rows.to(dtype), weight[tokens].to(dtype), part).float())
