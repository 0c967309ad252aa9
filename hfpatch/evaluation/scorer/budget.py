"""How much goes through the model at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hfpatch.evaluation.scorer.grouping import Tree


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

    The order depends on what the rows hold, not on the order they come in.
    """
    batch: list[Tree] = []
    for tree in sorted(trees, key=lambda tree: (tree.is_chain, -len(tree), tree.tokens)):
        if batch and ((len(batch) + 1) * len(batch[0]) > tokens or tree.is_chain != batch[0].is_chain):
            yield batch
            batch = []
        batch.append(tree)
    if batch:
        yield batch
