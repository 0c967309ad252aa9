"""How much goes through the model at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hfpatch.evaluation.scorer.grouping import Tree

_EVEN = 0.8


@dataclass(frozen=True)
class Budget:
    """The size of a batch.

    Attributes:
        tokens: the most tokens of a batch, padding included; a row that is longer goes alone. Half as many scored
            positions, or those of a few batches, are gathered before the head is asked.
        logits: how many logits exist at once, roughly.
    """

    tokens: int
    logits: int

    @classmethod
    def usual(cls, device: torch.device) -> Budget:
        """Return what keeps a device busy: on a CPU little, so that logits stay in its cache; on a GPU much."""
        return cls(tokens=512, logits=1 << 20) if device.type == "cpu" else cls(tokens=32768, logits=1 << 27)

    def smaller(self) -> Budget:
        """Return a quarter of the budget."""
        return Budget(tokens=max(1, self.tokens // 4), logits=max(1, self.logits // 4))


def batches(trees: Sequence[Tree], tokens: int) -> Iterator[list[Tree]]:
    """Yield batches of rows, the longest first; plain rows and trees apart.

    A batch that is half full takes no row that is much shorter than its longest: padding would cost more than a batch
    less saves. How batches are made up depends on what the rows hold, not on the order they come in.
    """
    batch: list[Tree] = []
    for tree in sorted(trees, key=lambda tree: (tree.is_chain, -len(tree), tree.tokens)):
        if batch and not _fits(tree, batch, tokens):
            yield batch
            batch = []
        batch.append(tree)
    if batch:
        yield batch


def _fits(tree: Tree, batch: Sequence[Tree], tokens: int) -> bool:
    longest = len(batch[0])
    if tree.is_chain != batch[0].is_chain or (len(batch) + 1) * longest > tokens:
        return False
    return len(tree) >= _EVEN * longest or len(batch) * longest < tokens / 2
