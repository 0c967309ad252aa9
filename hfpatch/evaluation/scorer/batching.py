"""Which rows go through the model together, and as which arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hfpatch.evaluation.scorer.trees import Tree


@dataclass(frozen=True)
class BatchLimits:
    """The size of a batch.

    Attributes:
        tokens: the most tokens of a batch, padding included; a row that is longer goes alone. The head is applied to
            half as many scored positions at once, or to those of a few batches.
        logits: how many logits exist at once, roughly.
        overhead: the fixed cost of a batch, in tokens; a guess for the device.
    """

    tokens: int
    logits: int
    overhead: int = 16

    @classmethod
    def for_device(cls, device: torch.device) -> BatchLimits:
        """Return limits that keep a device busy: small on a CPU, so that logits stay in its cache; large on a GPU."""
        if device.type == "cpu":
            return cls(tokens=512, logits=1 << 20)
        return cls(tokens=32768, logits=1 << 27, overhead=2048)

    def quarter(self) -> BatchLimits:
        """Return a quarter of these limits."""
        return replace(self, tokens=max(1, self.tokens // 4), logits=max(1, self.logits // 4))


def batches(rows: Sequence[Tree], limits: BatchLimits) -> list[list[Tree]]:
    """Return batches of rows, the longest first; plain rows and trees are in different batches.

    The batches depend on the tokens of the rows, not on their order.
    """
    made = []
    for plain in (False, True):
        alike = sorted((row for row in rows if row.is_chain == plain), key=lambda row: (-len(row), row.tokens))
        ends = _ends([len(row) for row in alike], limits)
        made += [alike[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return made


def _ends(lengths: Sequence[int], limits: BatchLimits) -> list[int]:
    """Return the ends of the batches that have the least total cost.

    A batch costs its rows times its longest row, and a fixed overhead: with ``C(n)`` the least cost of the first n
    rows, ``C(n) = min over j of C(j) + (n - j) · length(j) + overhead``.

    Args:
        lengths: of the rows, descending.
        limits: what a batch may contain.
    """
    costs = np.full(len(lengths) + 1, np.inf)
    costs[0] = 0
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    for start, longest in enumerate(lengths):
        most = min(max(1, limits.tokens // longest), len(lengths) - start)
        ends = slice(start + 1, start + 1 + most)
        found = costs[start] + longest * np.arange(1, most + 1) + limits.overhead
        starts[ends] = np.where(found < costs[ends], start, starts[ends])
        costs[ends] = np.minimum(found, costs[ends])
    made = [len(lengths)]
    while made[-1]:
        made.append(int(starts[made[-1]]))
    return made[-2::-1]


def model_inputs(model: Any, trees: Sequence[Tree]) -> dict[str, Tensor]:
    """Return the arguments for a batch of rows, padded on the right.

    Plain rows need nothing but their tokens: with causal attention no token attends to the padding. Trees need position
    ids (batch, seq) and a mask (batch, 1, seq, seq) with which each token attends to its ancestors and itself. The mask
    is boolean for sdpa; eager attention adds it to its scores.
    """
    longest = max(len(tree) for tree in trees)
    tokens = torch.tensor([tree.tokens + [0] * (longest - len(tree)) for tree in trees], device=model.device)
    if all(tree.is_chain for tree in trees):
        return {"tokens": tokens}
    positions = torch.tensor([tree.depths + [0] * (longest - len(tree)) for tree in trees], device=model.device)
    mask = torch.from_numpy(np.stack([visible(tree, longest) for tree in trees])[:, None]).to(model.device)
    if model.config._attn_implementation != "sdpa":
        zeros = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
        mask = zeros.masked_fill_(~mask, torch.finfo(model.dtype).min)
    return {"tokens": tokens, "position_ids": positions, "attention_mask": mask}


def visible(tree: Tree, longest: int) -> NDArray[np.bool_]:
    """Return which tokens each token of a tree attends to, (longest, longest); padding attends to itself."""
    seen = np.eye(longest, dtype=bool)
    chain = next((node for node, parent in enumerate(tree.parents) if parent != node - 1), len(tree))
    seen[:chain, :chain] = np.tri(chain, dtype=bool)
    for node in range(chain, len(tree)):
        if tree.parents[node] >= 0:
            seen[node] |= seen[tree.parents[node]]
    return seen
