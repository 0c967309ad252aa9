"""Which rows go through the model together, and as which arguments."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hfpatch.evaluation.scorer.trees import Tree
from hfpatch.sites import input_device

_MOST_BATCHES = 16  # of a unit: scores have waited for long enough
_ENOUGH_UNITS = 16  # to be shared out evenly; fewer where they would become so small that they cost more
_FEWEST_POSITIONS = 48  # of a unit: to read the head's weights takes as long as some 30 positions


@dataclass(frozen=True)
class BatchLimits:
    """The size of a batch.

    Attributes:
        tokens: the most tokens of a batch, padding included; a row that is longer goes alone. The head is applied to
            half as many scored positions at once, or to those of a few batches.
        logits: how many logits exist at once, roughly.
        overhead: the fixed cost of a batch, in tokens; a guess for the device.
        fewest: the tokens of a batch below which small tasks are not divided into more batches.
    """

    tokens: int
    logits: int
    overhead: int = 48  # on one thread 40 tokens at 160M, 50 to 70 at 70M
    fewest: int = 512

    @classmethod
    def for_device(cls, device: torch.device) -> BatchLimits:
        """Return limits that keep a device busy: small on a CPU, so that logits stay in its cache; large on a GPU."""
        if device.type == "cpu":
            return cls(tokens=512, logits=1 << 20)
        return cls(tokens=32768, logits=1 << 27, overhead=2048, fewest=8192)

    def divided(self, total: int) -> BatchLimits:
        """Return limits by which so many tokens become enough batches, unless these would be too small."""
        most = max(self.fewest, total // _ENOUGH_UNITS)
        return replace(self, tokens=min(self.tokens, most))


@dataclass(frozen=True)
class Unit:
    """Batches whose scored positions go through the head together, and whose scores are known at the same time."""

    batches: list[list[Tree]]

    def requests(self) -> Iterator[int]:
        """Yield the indices of the requests that it scores."""
        return (index for batch in self.batches for tree in batch for index, _ in tree.scored)

    def missing(self, done: Collection[int]) -> Iterator[list[Tree]]:
        """Yield the batches that score at least one request that is not done."""
        return (batch for batch in self.batches if any(i not in done for tree in batch for i, _ in tree.scored))

    def cost(self, done: Collection[int]) -> int:
        """Return the tokens, padding included, of the batches that are not done."""
        return sum(len(batch) * max(map(len, batch)) for batch in self.missing(done))


def units(made: Sequence[list[Tree]], limits: BatchLimits, *, together: bool = True) -> list[Unit]:
    """Return batches in units, in their order; they depend on nothing but the batches.

    A unit ends when it has half as many scored positions as a batch may have tokens, or a number of batches that leaves
    enough units, and enough positions for the head. Without ``together`` each batch is a unit.
    """
    most, few = (_MOST_BATCHES, _FEWEST_POSITIONS) if together else (1, 0)
    enough = min(most, max(1, len(made) // _ENOUGH_UNITS))
    filled, positions = [Unit([])] if made else [], 0
    for batch in made:
        count = len(filled[-1].batches)
        if count == most or (count >= enough and positions >= few) or positions >= limits.tokens // 2:
            filled.append(Unit([]))
            positions = 0
        filled[-1].batches.append(batch)
        positions += sum(len({node for _, nodes in tree.scored for node in nodes}) for tree in batch)
    return filled


def batches(rows: Sequence[Tree], limits: BatchLimits) -> list[list[Tree]]:
    """Return the batches of rows that have the least total cost, the longest rows first.

    Plain rows and trees are in different batches. A batch costs its rows times its longest row, and a fixed overhead:
    with ``C(n)`` the least cost of the first n rows, ``C(n) = min over j of C(j) + (n - j) · length(j) + overhead``.
    The batches depend on the tokens of the rows, not on their order.
    """
    made = []
    for plain in (False, True):
        alike = sorted((row for row in rows if row.is_chain == plain), key=lambda row: (-len(row), row.tokens))
        costs = np.full(len(alike) + 1, np.inf)
        costs[0] = 0
        starts = np.zeros(len(alike) + 1, dtype=np.int64)
        for start, longest in enumerate(map(len, alike)):
            most = min(max(1, limits.tokens // longest), len(alike) - start)
            ends = slice(start + 1, start + 1 + most)
            totals = costs[start] + longest * np.arange(1, most + 1) + limits.overhead
            starts[ends] = np.where(totals < costs[ends], start, starts[ends])
            costs[ends] = np.minimum(totals, costs[ends])
        cuts = [len(alike)]
        while cuts[-1]:
            cuts.append(int(starts[cuts[-1]]))
        made += [alike[start:end] for end, start in reversed(list(itertools.pairwise(cuts)))]
    return made


def model_inputs(model: Any, trees: Sequence[Tree]) -> dict[str, Tensor]:
    """Return the arguments for a batch of rows, padded on the right.

    Plain rows need nothing but their tokens: with causal attention no token attends to the padding. Trees need position
    ids (batch, seq) and a mask (batch, 1, seq, seq) with which each token attends to its ancestors and itself. The mask
    is boolean for sdpa; eager attention adds it to its scores.
    """
    longest, device = max(len(tree) for tree in trees), input_device(model)
    tokens = torch.tensor([tree.tokens + [0] * (longest - len(tree)) for tree in trees], device=device)
    if all(tree.is_chain for tree in trees):
        return {"tokens": tokens}
    positions = torch.tensor([tree.depths + [0] * (longest - len(tree)) for tree in trees], device=device)
    mask = torch.from_numpy(np.stack([visible(tree, longest) for tree in trees])[:, None]).to(device)
    if model.config._attn_implementation != "sdpa":
        zeros = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
        mask = zeros.masked_fill_(~mask, torch.finfo(model.dtype).min)
    return {"tokens": tokens, "position_ids": positions, "attention_mask": mask}


def visible(tree: Tree, longest: int) -> NDArray[np.bool_]:
    """Return which tokens each token of a tree attends to, (longest, longest); padding attends to itself."""
    reads = np.eye(longest, dtype=bool)
    chain = next((node for node, parent in enumerate(tree.parents) if parent != node - 1), len(tree))
    reads[:chain, :chain] = np.tri(chain, dtype=bool)
    for node in range(chain, len(tree)):
        if tree.parents[node] >= 0:
            reads[node] |= reads[tree.parents[node]]
    return reads
