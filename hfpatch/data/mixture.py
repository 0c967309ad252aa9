"""Mixtures: the blocks of several sources as one, and which documents of each are taken for tuning."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.corpora import documents
from hfpatch.data.joining import JoinedRows, Part
from hfpatch.data.tuning import TuningText, digest_text
from hfpatch.recipes.data import DataSettings, split_by_weight


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
    parts = tuple(
        Part(each.source, each.revision, each.sha256, weight, each.documents, len(each), each.tokens)
        for each, weight in zip(blocks, weights, strict=True)
    )
    return TokenBlocks(
        rows=JoinedRows([np.asarray(each.rows) for each in blocks]),
        sizes=np.concatenate([each.sizes for each in blocks]),
        offsets=np.concatenate([[0], *(each.offsets[1:] + at for each, at in zip(blocks, starts, strict=True))]),
        layout=blocks[0].layout,
        documents=sum(each.documents for each in blocks),
        source=" + ".join(f"{part.weight:g} × {part.source}" for part in parts),
        revision=None,
        sha256=hashlib.sha256(" + ".join(part.sha256 for part in parts).encode()).hexdigest(),
        learned=learned,
        parts=parts,
    )


def tuning_texts(settings: DataSettings, tuning: TuningText, data_dir: Path | None = None) -> list[TuningText | None]:
    """Return which documents tuning takes from each source: its share by weight, and none that another source has."""
    parts = settings.parts()
    if len(parts) == 1:
        return [replace(tuning, format=settings.format)]
    digests = [frozenset(map(digest_text, documents(part, data_dir=data_dir))) for part in parts]
    found: list[TuningText | None] = []
    for place, (part, share) in enumerate(zip(parts, split_by_weight(tuning.documents, settings.weights), strict=True)):
        others = frozenset().union(*digests[:place], *digests[place + 1 :])
        found.append(TuningText(share, tuning.excluded | others, part.format) if share else None)
    return found


def _mask(blocks: TokenBlocks) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return which tokens are learned; of a text all are, for which one value is enough."""
    if blocks.learned is None:
        return np.broadcast_to(np.True_, (len(blocks), blocks.block_size))
    return np.asarray(blocks.learned)
