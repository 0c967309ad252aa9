"""Token blocks: the fixed-length rows that batches are drawn from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hfpatch.data.packing import pack, split_pieces
from hfpatch.data.settings import DataSettings
from hfpatch.data.tokenise import TokenArray, TokenStream

IGNORE = -100


@dataclass(frozen=True)
class TokenBlocks:
    """Rows of ``block_size`` tokens, in memory or mapped from a file.

    A packed row holds several pieces; ``position_ids`` restart at each, and the first token of each is never
    predicted, so nothing is learnt across documents. What no piece fills is one more stretch of its own, never
    predicted either. A padded row holds one piece and an ``attention_mask``.

    Attributes:
        rows: (blocks, block_size) token ids.
        sizes: (pieces,) int32 tokens of each piece, row by row.
        offsets: (blocks + 1,) int64, where each row's pieces begin in ``sizes``.
        packing: whether a row may hold several pieces.
        documents: how many documents the rows were made from.
        source: the recipe's ``data.source``.
        revision: the hub revision, or None.
        sha256: hash of the rows and their pieces.
    """

    rows: TokenArray
    sizes: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    packing: bool
    documents: int
    source: str
    revision: str | None
    sha256: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``labels`` and ``position_ids`` (packed) or ``attention_mask``, each (block_size,)."""
        ids = torch.from_numpy(self.rows[index].astype(np.int64))
        positions = torch.from_numpy(self._positions(index))
        filled = self._pieces(index).sum()
        labels = ids.masked_fill(positions == 0, IGNORE)
        labels[filled:] = IGNORE
        if self.packing:
            return {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(len(ids)) < filled).long()}

    def head(self, count: int) -> TokenBlocks:
        """Return the first ``count`` rows as blocks of their own."""
        offsets = self.offsets[: count + 1]
        rows, sizes = self.rows[:count], self.sizes[: offsets[-1]]
        return replace(self, rows=rows, sizes=sizes, offsets=offsets, sha256=_hash_arrays(rows, sizes, offsets))

    @property
    def block_size(self) -> int:
        """Tokens in a row, padding included."""
        return int(self.rows.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens in all rows, padding not counted."""
        return int(self.sizes.sum())

    def count_tokens(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> int:
        """Tokens in the rows named by ``indices``, padding not counted."""
        return sum(int(self._pieces(int(index)).sum()) for index in indices)

    def count_predicted(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> int:
        """Tokens that the rows named by ``indices`` predict: all but the first of each piece."""
        return self.count_tokens(indices) - sum(len(self._pieces(int(index))) for index in indices)

    def to_json(self) -> dict[str, Any]:
        """Return what a result says about its data."""
        return {
            "source": self.source,
            "revision": self.revision,
            "sha256": self.sha256,
            "documents": self.documents,
            "blocks": len(self),
            "tokens": self.tokens,
            "block_size": self.block_size,
            "packing": self.packing,
        }

    def _pieces(self, index: int) -> npt.NDArray[np.int32]:
        return self.sizes[self.offsets[index] : self.offsets[index + 1]]

    def _positions(self, index: int) -> npt.NDArray[np.int64]:
        sizes = self._pieces(index)
        rest = self.block_size - int(sizes.sum())
        return np.concatenate([np.arange(size, dtype=np.int64) for size in (*sizes, rest)])


def blocks_from_stream(
    stream: TokenStream, settings: DataSettings, *, pad_token_id: int, revision: str | None = None
) -> TokenBlocks:
    """Lay a token stream out in rows: packed by best fit, or one truncated document a row."""
    size = settings.block_size
    if settings.packing:
        pieces = split_pieces(stream.lengths, size)
        members = pack(pieces[:, 1].tolist(), size)
    else:
        starts = np.cumsum(stream.lengths) - stream.lengths
        pieces = np.stack([starts, np.minimum(stream.lengths, size)], axis=1)
        members = [[index] for index in range(len(pieces))]
    order = pieces[[piece for row in members for piece in row]]
    offsets = np.cumsum([0, *map(len, members)], dtype=np.int64)
    rows = np.full((len(members), size), pad_token_id, dtype=stream.tokens.dtype)
    for row, (begin, end) in enumerate(pairwise(offsets)):
        parts = [stream.tokens[start : start + length] for start, length in order[begin:end].tolist()]
        filled = np.concatenate(parts)
        rows[row, : len(filled)] = filled
    sizes = order[:, 1].astype(np.int32)
    return TokenBlocks(
        rows=rows,
        sizes=sizes,
        offsets=offsets,
        packing=settings.packing,
        documents=len(stream.lengths),
        source=settings.source,
        revision=revision,
        sha256=_hash_arrays(rows, sizes, offsets),
    )


def _hash_arrays(*arrays: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
