"""Equal documents, found by digests of their text and of their token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Values = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
LONG = 64
"""A reply, or a line of a task's document, of this many characters counts as a document; a shorter reply may answer
several prompts."""


@dataclass(frozen=True)
class Digests:
    """Digests of documents and of their parts.

    Two documents are equal if the whole of one is the whole or a part of the other; common parts, such as a system
    prompt, are not enough.

    Attributes:
        values: (n,) 64 bits each.
        documents: (n,) int64, the document that each is of.
        whole: (n,) whether it is of the whole document, or of a part that counts as one.
    """

    values: Values
    documents: npt.NDArray[np.int64]
    whole: Flags

    @classmethod
    def of(cls, documents: Sequence[Iterable[tuple[int, bool]]]) -> Digests:
        """Return the digests of documents, each given with its flag ``whole``."""
        rows = [(value, index, whole) for index, document in enumerate(documents) for value, whole in document]
        values, indices, flags = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(np.array(values, np.uint64), np.array(indices, np.int64), np.array(flags, np.bool_))

    @classmethod
    def join(cls, digests: Sequence[Digests], counts: Sequence[int]) -> Digests:
        """Return the digests of several sources of so many documents each, one source after the other."""
        firsts = np.cumsum([0, *counts])[:-1]
        return cls(
            np.concatenate([digest.values for digest in digests]),
            np.concatenate([part.documents + first for part, first in zip(digests, firsts, strict=True)]),
            np.concatenate([digest.whole for digest in digests]),
        )

    def take(self, indices: npt.NDArray[np.int64]) -> Digests:
        """Return the digests of these documents."""
        kept = np.isin(self.documents, indices)
        return Digests(self.values[kept], self.documents[kept], self.whole[kept])

    def repeated(self, groups: npt.NDArray[np.int64]) -> Flags:
        """Return which documents equal one of another group; ``groups`` (documents,) is the group of each."""
        order = np.lexsort((~self.whole, groups[self.documents], self.values))  # of a group wholes before parts
        values, group, whole = self.values[order], groups[self.documents][order], self.whole[order]
        first = np.ones(len(order), np.bool_)
        first[1:] = (values[1:] != values[:-1]) | (group[1:] != group[:-1])
        _, number = np.unique(values, return_inverse=True)
        having = np.bincount(number[first])  # groups with each value, and with a document that is it
        being = np.bincount(number[first], weights=whole[first])
        group_is = whole[first][np.cumsum(first) - 1]  # whether the entry's group has such a document
        elsewhere = np.where(whole, having[number] > 1, being[number] > group_is)
        return np.isin(np.arange(len(groups)), self.documents[order][elsewhere])

    def among(self, others: Digests, count: int) -> Flags:
        """Return which of ``count`` documents equal one of ``others``."""
        same = np.isin(self.values, others.values) & self.whole
        same |= np.isin(self.values, others.values[others.whole])
        return np.isin(np.arange(count), self.documents[same])


class Digester:
    """Digests token ids, and texts after the tokenizer's normalizer (lower case, Unicode forms), if it has one."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self._normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._ends = {getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")}

    def text(self, text: str) -> int:
        """Return the digest of a text, runs of white space counted as one space."""
        words = " ".join(text.split()).encode("utf-8", "replace")
        if self._normalizer is not None:
            words = self._normalizer.normalize_str(words.decode()).encode()
        return xxhash.xxh3_64_intdigest(words)

    def ids(self, ids: npt.NDArray[Any] | Sequence[int]) -> int:
        """Return the digest of token ids without the tokens that begin and end a document."""
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(self._inner(ids), dtype="<u4").data, seed=1)

    def document(self, text: str, ids: npt.NDArray[Any] | Sequence[int]) -> list[tuple[int, bool]]:
        """Return the digests of a plain text."""
        return [(self.text(text), True), (self.ids(ids), True)]

    def tokens(self, ids: npt.NDArray[Any] | Sequence[int]) -> list[tuple[int, bool]]:
        """Return the digests of a document of token ids: of its decoded text, too."""
        return self.document(self.tokenizer.decode(self._inner(ids), clean_up_tokenization_spaces=False), ids)

    def _inner(self, ids: npt.NDArray[Any] | Sequence[int]) -> npt.NDArray[Any] | Sequence[int]:
        """Return ids without the tokens that begin and end a document."""
        start, stop = 0, len(ids)
        while start < stop and int(ids[start]) in self._ends:
            start += 1
        while start < stop and int(ids[stop - 1]) in self._ends:
            stop -= 1
        return ids[start:stop]
