"""Rows of several sources, one after the other, without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Part:
    """One source of a mixture.

    Attributes:
        source: the ``data.source``.
        revision: the hub revision, or None.
        sha256: the hash of its blocks.
        weight: its share of the blocks that are drawn, relative to the others' weights.
        documents: how many documents its blocks were made from.
        blocks: how many blocks it has.
        tokens: how many tokens they have, padding not counted.
    """

    source: str
    revision: str | None
    sha256: str
    weight: float
    documents: int
    blocks: int
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the facts that results record."""
        return asdict(self)


class JoinedRows:
    """Arrays of rows as one, read like an array: by an index, or by an array of indices.

    Args:
        arrays: (rows, block_size) each, in memory, mapped or broadcast.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self.arrays = list(arrays)
        self._ends = np.cumsum([len(array) for array in arrays])
        self.shape = (int(self._ends[-1]), arrays[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        if isinstance(index, np.ndarray):
            return np.stack([self[int(each)] for each in index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        which = int(np.searchsorted(self._ends, index, side="right"))
        array = self.arrays[which]
        row: npt.NDArray[Any] = array[index - (int(self._ends[which]) - len(array))]
        return row

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.concatenate(self.arrays).astype(dtype or self.arrays[0].dtype, copy=False)
