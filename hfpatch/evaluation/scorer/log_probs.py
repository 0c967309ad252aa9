"""Scores from the features of scored positions: log-probabilities of targets, and whether each is the greedy token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hfpatch.evaluation.scorer.batching import BatchLimits
from hfpatch.evaluation.scorer.head import BodyAndHead, Parts
from hfpatch.nn.softmax import RunningSoftmax

Score = tuple[float, bool]
"""The log-likelihood of a request's targets, and whether all of them are greedy."""
Targets = NDArray[np.int64]
"""Of each target the position that predicts it, its token and its request, (targets, 3)."""

_FEWEST_ROWS = 64  # at once; each time the weights of the head are read again
_NEAR = 1e-5  # relative: what rounding in fp32 may change of a log-probability


def score_positions(
    parts: Parts, batches: Sequence[tuple[Tensor, Targets]], limits: BatchLimits
) -> list[tuple[int, Score]]:
    """Return the index and the score of each request of a unit, whose batches keep the head busy together.

    ``batches`` are the features (n, width) of scored positions and the targets that they predict.
    """
    features = torch.cat([rows for rows, _ in batches])
    starts = np.cumsum([0, *(len(rows) for rows, _ in batches)])
    moved = [table + np.array([start, 0, 0]) for (_, table), start in zip(batches, starts, strict=False)]
    targets = np.concatenate(moved)

    # some rows of features at a time
    logits = limits.logits
    if not isinstance(parts, BodyAndHead):
        step = max(_FEWEST_ROWS, logits // features.shape[-1])
    else:
        step = limits.tokens if parts.sliceable(features) else max(_FEWEST_ROWS, logits // len(parts.head.weight))
    results = []
    for start in range(0, len(features), step):
        first, last = np.searchsorted(targets[:, 0], [start, start + step])
        rows, tokens = torch.from_numpy(targets[first:last, :2].T.copy()).to(features.device)
        results.append(log_probabilities(parts, features[start : start + step], rows - start, tokens, logits))
    values, greedy = (torch.cat(column).cpu() for column in zip(*results, strict=True))

    # sums by request
    indices, at = np.unique(targets[:, 2], return_inverse=True)
    sums = np.bincount(at, weights=values.double().numpy())
    misses = np.bincount(at, weights=(~greedy).numpy())
    return [(int(i), (float(s), bool(m == 0))) for i, s, m in zip(indices, sums, misses, strict=True)]


def log_probabilities(
    parts: Parts, features: Tensor, rows: Tensor, tokens: Tensor, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability (targets,) in fp32 and whether it is the greedy token.

    The greedy token is lm-eval's, the arg max of a row's log-probabilities: rounding makes log-probabilities equal
    where logits are not quite, and of equal ones the first counts.

    Where the head is a matrix, the vocabulary comes in slices, so that the logits of a slice fit the processor's cache.
    Running over the slices: `RunningSoftmax`, with the largest logit ``m`` of each row, and the second largest of the
    slices' peaks. A target is the greedy token if its logit reaches ``m`` and no other logit is near it: those in its
    own slice are counted, those in other slices are bounded by the second largest peak. All these logits come from one
    product, so its precision (TF32, bf16) does not matter. If others are near, `from_logits` decides.

    Args:
        parts: the model in two steps.
        features: (n, width).
        rows: (targets,), the row of each target.
        tokens: (targets,), the target tokens.
        numbers: how many logits may exist at once, roughly.
    """
    if not (isinstance(parts, BodyAndHead) and parts.sliceable(features)):
        return from_logits(parts.logits(features), rows, tokens)
    softmax = RunningSoftmax(len(features), features.device)
    runner_up = softmax.top
    wanted = torch.zeros(len(tokens), dtype=torch.float32, device=features.device)
    rivals = torch.full_like(tokens, 2)
    for start, logits in parts.slices(features, numbers):
        peak = logits.amax(dim=-1)
        (inside,) = ((tokens >= start) & (tokens < start + logits.shape[1])).nonzero(as_tuple=True)
        wanted[inside] = logits[rows[inside], tokens[inside] - start]
        near = inside[_reaches(wanted[inside], torch.maximum(peak, softmax.top)[rows[inside]])]
        rivals[near] = _reaches(logits[rows[near]], wanted[near, None]).sum(dim=-1)
        runner_up = torch.maximum(runner_up, torch.minimum(softmax.top, peak))
        softmax.add(logits, peak)
    top = softmax.top
    greedy = _reaches(wanted, top[rows])
    (unclear,) = (greedy & ((rivals > 1) | _reaches(runner_up[rows], wanted))).nonzero(as_tuple=True)
    for some in torch.split(unclear, max(1, numbers // len(parts.head.weight))):
        index = torch.arange(len(some), device=rows.device)
        greedy[some] = from_logits(parts.logits(features[rows[some]]), index, tokens[some])[1]
    return (wanted - top[rows]) - softmax.total.log()[rows], greedy


def from_logits(logits: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and greedy decisions from logits (n, vocabulary) in fp32, which are overwritten."""
    rows, tokens = rows.to(logits.device), tokens.to(logits.device)  # where the head is
    top = logits.amax(dim=-1)
    wanted, highest = logits[rows, tokens], top[rows]
    greedy = _reaches(wanted, highest)
    (near,) = greedy.nonzero(as_tuple=True)
    if len(near):
        greedy[near] = logits[rows[near]].log_softmax(dim=-1).argmax(dim=-1) == tokens[near]
    total = logits.sub_(top[:, None]).exp_().sum(dim=-1).log()
    return (wanted - highest) - total[rows], greedy


def _reaches(logits: Tensor, others: Tensor) -> Tensor:
    """Return where logits are as large as others, up to the rounding of a log-probability."""
    return logits >= others - _NEAR * (1 + others.abs())
