"""Mixtures: the blocks of several sources as one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.joining import JoinedRows, Part
from hfpatch.data.tokenizer import TokenArray


def join_blocks(blocks: Sequence[TokenBlocks], weights: Sequence[float]) -> TokenBlocks:
    """Return the blocks of several sources, one source after the other; none is copied.

    Args:
        blocks: those of each source, of one layout and block size.
        weights: the weight of each.
    """
    counts = [0, *(len(each.sizes) for each in blocks)]
    starts = np.cumsum(counts)[:-1]
    learned = None
    if any(each.learned is not None for each in blocks):
        learned = JoinedRows([_mask(each) for each in blocks])
    owners = None
    known = [each.owners for each in blocks if each.owners is not None]
    if len(known) == len(blocks):
        firsts = np.cumsum([0, *(int(own.max()) + 1 for own in known[:-1])])
        moved = [np.where(own < 0, own, own + first) for own, first in zip(known, firsts, strict=True)]
        owners = np.concatenate(moved).astype(np.int32)
    parts = tuple(
        Part(each.source, each.revision, each.sha256, weight, each.documents, len(each), each.tokens)
        for each, weight in zip(blocks, weights, strict=True)
    )
    return TokenBlocks(
        rows=JoinedRows([array for each in blocks for array in _arrays(each.rows)]),
        sizes=np.concatenate([each.sizes for each in blocks]),
        offsets=np.concatenate([[0], *(each.offsets[1:] + at for each, at in zip(blocks, starts, strict=True))]),
        layout=blocks[0].layout,
        documents=sum(each.documents for each in blocks),
        source=" + ".join(f"{part.weight:g} × {part.source}" for part in parts),
        revision=None,
        sha256=hashlib.sha256(" + ".join(part.sha256 for part in parts).encode()).hexdigest(),
        learned=learned,
        parts=parts,
        owners=owners,
    )


def _arrays(rows: TokenArray | JoinedRows) -> list[TokenArray]:
    return list(rows.arrays) if isinstance(rows, JoinedRows) else [rows]


def _mask(blocks: TokenBlocks) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return which tokens are learned; of a text all are, for which one value is enough."""
    if blocks.learned is None:
        return np.broadcast_to(np.True_, (len(blocks), blocks.block_size))
    return np.asarray(blocks.learned)
