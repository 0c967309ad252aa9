"""The documents of blocks: their hashes, and the bytes of text that the loss is measured on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import IGNORE, TokenBlocks

_PARTIAL = "\ufffd"


@dataclass(frozen=True)
class Documents:
    """The documents of some blocks.

    Attributes:
        hashes: 16 hex digits of each, of its tokens in the blocks and of which of them are predicted.
        bytes: (documents,) int64, the UTF-8 bytes of the text of each one's predicted tokens.
    """

    hashes: list[str]
    bytes: npt.NDArray[np.int64]


def describe_documents(blocks: TokenBlocks, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Return the hashes and bytes of the documents of blocks.

    A token's text is its addition to the text of the tokens before it in its row and document. Special tokens have
    none; a character of several tokens counts with the last one.

    Args:
        blocks: blocks with ``owners``.
        tokenizer: the tokenizer that made them.

    Raises:
        ValueError: if the blocks do not know their documents.
    """
    if blocks.owners is None:
        raise ValueError("the blocks do not know their documents")
    count = int(blocks.owners.max()) + 1
    digests, sizes = [hashlib.sha256() for _ in range(count)], np.zeros(count, np.int64)
    for index, owners in enumerate(blocks.owners):
        row = blocks[index]
        ids, predicted = row["input_ids"].numpy(), row["labels"].numpy() != IGNORE
        bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        for start, stop in pairwise(bounds):
            document, own, counted = int(owners[start]), ids[start:stop], predicted[start:stop]
            if document >= 0:
                digests[document].update(own.astype("<u4").tobytes() + counted.tobytes())
                sizes[document] += _predicted_bytes(own, counted, tokenizer)
    return Documents([digest.hexdigest()[:16] for digest in digests], sizes)


def _predicted_bytes(
    ids: npt.NDArray[np.int64], predicted: npt.NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return the bytes of the text of the predicted tokens of a stretch of one document."""
    edges = np.flatnonzero(np.diff(predicted.astype(np.int8), prepend=0, append=0)).tolist()  # begin, end, begin, ...
    signs = [1 if place % 2 else -1 for place in range(len(edges))]
    return sum(sign * _text_bytes(ids[:edge], tokenizer) for sign, edge in zip(signs, edges, strict=True))


def _text_bytes(ids: npt.NDArray[np.int64], tokenizer: PreTrainedTokenizerBase) -> int:
    text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(text.rstrip(_PARTIAL).encode("utf-8"))
