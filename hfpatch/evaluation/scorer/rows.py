"""Scored positions of many rows, and what the head makes of them: log-likelihoods and greedy decisions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hfpatch.evaluation.scorer.budget import Budget
from hfpatch.evaluation.scorer.grouping import TokenRequest, Tree
from hfpatch.evaluation.scorer.head import BodyAndHead, Parts
from hfpatch.evaluation.scorer.softmax import Targets, log_probabilities

Answer = tuple[float, bool]
Table = NDArray[np.int64]

_FEWEST_ROWS = 64
_MOST_BATCHES = 16


class Pool:
    """Features of scored positions, gathered over batches until there are enough to keep the head busy.

    Args:
        parts: the model in two steps.
        budget: how many logits may exist at once.
    """

    def __init__(self, parts: Parts, budget: Budget) -> None:
        self._parts = parts
        self._budget = budget
        self._features: list[Tensor] = []
        self._targets: list[Table] = []
        self._size = 0

    @property
    def full(self) -> bool:
        """Whether the head is worth asking, or answers have been held back for long enough."""
        enough = self._size >= self._budget.tokens // 2 or len(self._features) >= _MOST_BATCHES
        return enough or not isinstance(self._parts, BodyAndHead)

    def add(self, features: Tensor, targets: Table) -> None:
        """Take the features (n, width) of a batch's scored positions, and what `scored_places` says of them."""
        self._features.append(features)
        self._targets.append(targets + np.array([self._size, 0, 0]))
        self._size += len(features)

    def empty(self) -> list[tuple[int, Answer]]:
        """Return the index and the answer of each request that was added, and forget them."""
        if not self._features:
            return []
        features, targets = torch.cat(self._features), np.concatenate(self._targets)
        self._features, self._targets, self._size = [], [], 0
        return _answers(targets[:, 2], *self._score(features, targets))

    def _score(self, features: Tensor, targets: Table) -> tuple[Tensor, Tensor]:
        """Return each target's log-probability and greedy decision (targets,), some rows of features at a time."""
        found = []
        step = self._step(features)
        for start in range(0, len(features), step):
            first, last = np.searchsorted(targets[:, 0], [start, start + step])
            rows, tokens = torch.from_numpy(targets[first:last, :2].T.copy()).to(features.device)
            asked = Targets(rows - start, tokens)
            found.append(log_probabilities(self._parts, features[start : start + step], asked, self._budget.logits))
        values, greedy = (torch.cat(each).cpu() for each in zip(*found, strict=True))
        return values, greedy

    def _step(self, features: Tensor) -> int:
        if not isinstance(self._parts, BodyAndHead):
            return max(_FEWEST_ROWS, self._budget.logits // features.shape[-1])
        if self._parts.sliceable(features):
            return self._budget.tokens
        return max(_FEWEST_ROWS, self._budget.logits // self._parts.vocabulary)


def scored_places(trees: Sequence[Tree], requests: Sequence[TokenRequest]) -> tuple[Table, Table]:
    """Return the scored positions of a batch, each once, and what is asked of them.

    Args:
        trees: the rows of the batch.
        requests: what is scored.

    Returns:
        Row and node of each position (n, 2); and of each target its position, its token and its request (targets, 3).
    """
    wanted = _wanted(trees, requests)
    places, at = np.unique(wanted[:, :2], axis=0, return_inverse=True)
    return places, np.column_stack([at.reshape(-1), wanted[:, 2:]])


def _wanted(trees: Sequence[Tree], requests: Sequence[TokenRequest]) -> Table:
    """Return the row, the node, the token and the request of each target, in order."""
    wanted = sorted(
        (row, node, target, index)
        for row, tree in enumerate(trees)
        for index, nodes in tree.scored
        for node, target in zip(nodes, requests[index].targets, strict=True)
    )
    return np.array(wanted, dtype=np.int64)


def _answers(requests: Table, values: Tensor, greedy: Tensor) -> list[tuple[int, Answer]]:
    """Return each request's sum of log-probabilities and whether all its targets are greedy."""
    indices, at = np.unique(requests, return_inverse=True)
    sums = np.bincount(at, weights=values.double().numpy())
    misses = np.bincount(at, weights=(~greedy).numpy())
    return [(int(i), (float(s), bool(m == 0))) for i, s, m in zip(indices, sums, misses, strict=True)]
