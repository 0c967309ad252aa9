"""How much goes through the model at once, and in which batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hfpatch.evaluation.scorer.grouping import Tree


@dataclass(frozen=True)
class Budget:
    """The size of a batch.

    Attributes:
        tokens: the most tokens of a batch, padding included; a row that is longer goes alone. Half as many scored
            positions, or those of a few batches, are gathered before the head is asked.
        logits: how many logits exist at once, roughly.
        per_batch: what a batch costs beside its tokens, in tokens; a guess at what suits the device.
    """

    tokens: int
    logits: int
    per_batch: int = 16

    @classmethod
    def usual(cls, device: torch.device) -> Budget:
        """Return what keeps a device busy: on a CPU little, so that logits stay in its cache; on a GPU much."""
        if device.type == "cpu":
            return cls(tokens=512, logits=1 << 20)
        return cls(tokens=32768, logits=1 << 27, per_batch=2048)

    def smaller(self) -> Budget:
        """Return a quarter of the budget."""
        return replace(self, tokens=max(1, self.tokens // 4), logits=max(1, self.logits // 4))


def batches(rows: Sequence[Tree], budget: Budget) -> list[list[Tree]]:
    """Return batches of rows, the longest first; plain rows and others apart.

    How batches are made up depends on what the rows hold, not on the order they come in.
    """
    made = []
    for plain in (False, True):
        alike = sorted((row for row in rows if row.is_chain == plain), key=lambda row: (-len(row), row.tokens))
        ends = _ends([len(row) for row in alike], budget)
        made += [alike[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return made


def _ends(lengths: Sequence[int], budget: Budget) -> list[int]:
    """Return where batches end so that all of them cost least together.

    A batch costs its rows times its longest row, and something beside: with ``C(n)`` the least cost of the first n
    rows, ``C(n) = min over j of C(j) + (n - j) · length(j) + per_batch``.

    Args:
        lengths: of the rows, falling.
        budget: what a batch may hold.
    """
    costs = np.full(len(lengths) + 1, np.inf)
    costs[0] = 0
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    for start, longest in enumerate(lengths):
        most = min(max(1, budget.tokens // longest), len(lengths) - start)
        ends = slice(start + 1, start + 1 + most)
        found = costs[start] + longest * np.arange(1, most + 1) + budget.per_batch
        starts[ends] = np.where(found < costs[ends], start, starts[ends])
        costs[ends] = np.minimum(found, costs[ends])
    made = [len(lengths)]
    while made[-1]:
        made.append(int(starts[made[-1]]))
    return made[-2::-1]
