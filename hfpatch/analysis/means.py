"""Means over tokens, and over the tokens at each position."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.analysis.running import Batch, Tokens, tokens_of

Key = TypeVar("Key", bound=Hashable)


class TokenMeans(Generic[Key]):
    """Sums of several numbers a token, by key; every token weighs the same, padding is left out."""

    def __init__(self) -> None:
        self._tokens: Tokens | None = None
        self._sums: dict[Key, tuple[Tensor, Tensor]] = {}

    def begin(self, batch: Batch) -> None:
        """Set the batch that the next values belong to."""
        self._tokens = tokens_of(batch)

    def add(self, key: Key, values: Tensor) -> None:
        """Add ``(batch, seq, n)`` numbers."""
        assert self._tokens is not None
        counted = self._tokens.counted.cpu()
        values = values.detach().cpu().double()[counted]
        positions = self._tokens.positions.cpu()[counted]
        old_sums, old_counts = self._sums.get(key, (torch.zeros(0, values.shape[-1]).double(), torch.zeros(0).double()))
        new = max(0, int(positions.max()) + 1 - len(old_counts)) if len(positions) else 0  # positions not yet seen
        sums = F.pad(old_sums, (0, 0, 0, new)).index_add_(0, positions, values)
        counts = F.pad(old_counts, (0, new)).index_add_(0, positions, torch.ones(len(positions)).double())
        self._sums[key] = (sums, counts)

    def seen(self) -> list[Key]:
        """Return the keys in the order of their first values, those without any token left out."""
        return [key for key, (_, counts) in self._sums.items() if counts.sum()]

    def mean(self, key: Key) -> list[float]:
        """Return the n means over tokens."""
        sums, counts = self._sums[key]
        return [float(value) for value in sums.sum(0) / counts.sum()]

    def by_position(self, key: Key, column: int) -> list[float]:
        """Return the mean of one column at each position, from the first."""
        sums, counts = self._sums[key]
        return [float(value) for value in sums[:, column] / counts.clamp_min(1)]


def norm_ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return ‖part‖ / ‖whole‖ over the last axis, in fp32: ``(..., n)`` -> ``(...)``."""
    ratio: Tensor = part.float().norm(dim=-1) / whole.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ratio
