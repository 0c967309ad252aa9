"""The documents that tuning measures on: taken from the training text, alone in it, and in no task."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hfpatch.data.rows import contents
from hfpatch.errors import HfpatchError
from hfpatch.recipes.sources import Format


@dataclass(frozen=True)
class TuningText:
    """Which documents are taken away from a text.

    Attributes:
        documents: how many.
        excluded: the digests of texts that are not taken, see `digest_text`; nor are documents that contain one.
        format: what a document is.
    """

    documents: int
    excluded: frozenset[int] = frozenset()
    format: Format = "text"

    def to_json(self) -> dict[str, Any]:
        """Return the number and a hash of what is excluded, for the key of a cache."""
        content = np.array(sorted(self.excluded), dtype="<u8").tobytes()
        return {"tuning": self.documents, "excluded": hashlib.sha256(content).hexdigest()}


def digest_text(text: str) -> int:
    """Return 64 bits of the SHA-256 of a text, runs of white space counted as one space."""
    words = " ".join(text.split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "little")


def digest_all(texts: Iterable[str]) -> frozenset[int]:
    """Return the digests of texts and of each of their lines, as training text is often one line a document."""
    return frozenset(digest_text(part) for text in texts for part in (text, *text.splitlines()))


def choose_documents(texts: Iterable[str], wanted: TuningText, *, held_out: int) -> frozenset[int]:
    """Return the places of the last documents that occur once in a text, are not excluded and not held out.

    Args:
        texts: all documents; they are read once.
        wanted: how many, and which not.
        held_out: so many of the last documents are held out otherwise.

    Raises:
        HfpatchError: if there are too few, or none would be left to train on.
    """
    known: set[int] = set()

    def noted() -> Iterator[str]:
        for place, text in enumerate(texts):
            if wanted.format != "text" and not wanted.excluded.isdisjoint(digest_all(contents(text, wanted.format))):
                known.add(place)
            yield text

    digests: npt.NDArray[np.uint64] = np.fromiter(map(digest_text, noted()), dtype=np.uint64)
    if wanted.documents + held_out >= len(digests):
        also = f", data.held_out {held_out}" if held_out else ""
        raise HfpatchError(
            f"tuning.held_out is {wanted.documents}{also} and there are {len(digests)} documents, so none is left to "
            "train on; hold fewer out or take more documents"
        )
    _, inverse, counts = np.unique(digests, return_inverse=True, return_counts=True)
    excluded = np.array(sorted(wanted.excluded), dtype=np.uint64)
    usable = (counts[inverse] == 1) & ~np.isin(digests, excluded)
    usable[sorted(known)] = False
    usable[len(digests) - held_out :] = False
    places = np.flatnonzero(usable)[-wanted.documents :]
    if len(places) < wanted.documents:
        raise HfpatchError(
            f"tuning.held_out is {wanted.documents}, and of {len(digests)} documents only {len(places)} occur once in "
            "the text and in none of the tasks; hold fewer out or take more documents"
        )
    return frozenset(places.tolist())


def put_last(texts: Iterable[str], places: Collection[int]) -> Iterator[str]:
    """Yield the texts with those at ``places`` at the end; only these are in memory."""
    chosen = []
    for place, text in enumerate(texts):
        if place in places:
            chosen.append(text)
        else:
            yield text
    yield from chosen
