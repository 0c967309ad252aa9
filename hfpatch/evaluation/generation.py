"""Text generation on several ranks: each generates some of the batches that one process would make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfpatch.support.ranks import Ranks


@dataclass
class SharedGeneration:
    """One pass over all batches of generation requests, in an order that all ranks share.

    Attributes:
        ranks: the processes that share the batches out.
        known: whether the tokens of all batches are known already.
        tokens: of batches, by their place in the order.
    """

    ranks: Ranks
    known: bool = False
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    _passed: int = 0
    _loads: list[int] = field(default_factory=list)

    def next_batch(self, context: Tensor, max_length: int, generate: Callable[[], Tensor]) -> Tensor:
        """Return the tokens (batch, seq) of the next batch; of one that another rank generates its contexts alone.

        Args:
            context: (batch, seq).
            max_length: the most tokens of a row, which decide what a batch costs: where texts end is not known before.
            generate: generates the batch.
        """
        place, self._passed = self._passed, self._passed + 1
        if self.known:
            return torch.tensor(self.tokens[place])
        self._loads = self._loads or [0] * self.ranks.count
        owner = self._loads.index(min(self._loads))
        self._loads[owner] += len(context) * max_length
        if owner != self.ranks.index:
            return context
        made = generate()
        self.tokens[place] = made.tolist()
        return made

    def gathered(self) -> SharedGeneration:
        """Return a pass in which the tokens of all batches are known."""
        every = {place: rows for part in self.ranks.everyone(self.tokens) for place, rows in part.items()}
        return SharedGeneration(self.ranks, known=True, tokens=every)
