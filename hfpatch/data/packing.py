"""Which pieces of documents share a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def split_pieces(lengths: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
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


def pack(sizes: Sequence[int], block_size: int) -> list[list[int]]:
    """Put pieces into rows of ``block_size`` by best fit, the longest first; no piece is cut.

    Each piece goes to the row with the least space that still holds it, or to a new row. One integer, used as a set
    of the spaces that some row has, finds that row in constant time.

    Returns:
        the indices of each row's pieces.
    """
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(block_size + 1)]
    spaces = 0
    for piece in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[piece]
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            spaces ^= 0 if by_space[space] else 1 << space
        else:
            space, row = block_size, len(rows)
            rows.append([])
        rows[row].append(piece)
        if space > size:
            by_space[space - size].append(row)
            spaces |= 1 << (space - size)
    return rows
