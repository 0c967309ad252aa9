"""The documents of blocks: their hashes, and the bytes of text that the loss is measured on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import IGNORE, TokenBlocks
from hfpatch.data.tokenizer import ByteCounter


@dataclass(frozen=True)
class Documents:
    """The documents of some blocks.

    Attributes:
        hashes: 16 hex digits for each, over its tokens in the blocks and which of them are predicted.
        bytes: (documents,) int64, the UTF-8 bytes of the text of its predicted tokens.
        groups: (documents,) int32, the group of each, counted from 0; None where each is one by itself.
    """

    hashes: list[str]
    bytes: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int32] | None = None


def describe_documents(blocks: TokenBlocks, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Return the hashes and bytes of the documents of blocks.

    A token's bytes are its addition to those of the tokens before it in its row and document, see
    :class:`hfpatch.data.tokenizer.ByteCounter`; of a character of several tokens each has its own. ``tokenizer`` is
    the one that made the blocks.
    """
    assert blocks.owners is not None  # they are kept of text to measure
    count, counter = int(blocks.owners.max()) + 1, ByteCounter(tokenizer)
    digests, sizes = [hashlib.sha256() for _ in range(count)], np.zeros(count, np.int64)
    for index, owners in enumerate(blocks.owners):
        row = blocks[index]
        ids, predicted = row["input_ids"].numpy(), row["labels"].numpy() != IGNORE
        bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        for start, stop in pairwise(bounds):
            document, tokens, counted = int(owners[start]), ids[start:stop], predicted[start:stop]
            if document >= 0:
                digests[document].update(tokens.astype("<u4").tobytes() + counted.tobytes())
                edges = np.flatnonzero(np.diff(counted.astype(np.int8), prepend=0, append=0)).tolist()
                for number, edge in enumerate(edges):  # begin, end, begin, ... of stretches that are predicted
                    size = counter.count(tokens[:edge].tolist())
                    sizes[document] += size if number % 2 else -size
    groups = None if blocks.groups is None else blocks.groups[:count]  # a stream may end before its last documents
    return Documents([digest.hexdigest()[:16] for digest in digests], sizes, groups)
