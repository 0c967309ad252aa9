"""Which pieces of documents share a row."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
_CHUNK = 1 << 16


def split_pieces(lengths: Integers, block_size: int) -> Integers:
    """Cut documents into pieces of at most ``block_size`` tokens.

    Args:
        lengths: (documents,) tokens of each document in a flat array that holds them one after the other.
        block_size: the longest piece.

    Returns:
        (pieces, 2) start in the flat array and length. Pieces of a single token have nothing to predict and are
        left out.
    """
    counts = -(-lengths // block_size)
    documents = np.repeat(np.arange(len(lengths)), counts)
    rank = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.cumsum(lengths) - lengths)[documents] + rank * block_size
    sizes = np.minimum(lengths[documents] - rank * block_size, block_size)
    kept = sizes > 1
    return np.stack([starts[kept], sizes[kept]], axis=1)


def pack(sizes: Integers, block_size: int) -> tuple[Integers, Integers]:
    """Put pieces into rows of ``block_size`` by best fit, the longest first; no piece is cut.

    Each piece goes to the row with the least space that still holds it, or to a new row. One integer, used as a set
    of the spaces that some row has, finds that row in constant time. A piece takes a few dozen bytes of memory.

    Args:
        sizes: (pieces,) tokens of each piece.
        block_size: tokens in a row.

    Returns:
        (pieces,) the indices of the pieces, row by row, and (rows + 1,) where each row begins among them.
    """
    by_space: list[list[int]] = [[] for _ in range(block_size + 1)]
    spaces, count = 0, 0
    longest_first = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    for start in range(0, len(sizes), _CHUNK):
        chosen = longest_first[start : start + _CHUNK]
        for place, size in enumerate(sizes[chosen].tolist(), start):
            fitting = spaces >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                row = by_space[space].pop()
                spaces ^= 0 if by_space[space] else 1 << space
            else:
                space, row, count = block_size, count, count + 1
            row_of[place] = row
            if space > size:
                by_space[space - size].append(row)
                spaces |= 1 << (space - size)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))]).astype(np.int64)
    return longest_first[np.argsort(row_of, kind="stable")], offsets
