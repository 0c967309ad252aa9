"""Documents of tasks, held-out documents and documents for tuning, which are kept out of the training text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hfpatch.data.copies import LONG, Digester, Digests, Flags, Values
from hfpatch.data.corpora import Corpus, filtered_documents
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings

Places = npt.NDArray[np.int64]
NOTHING: Values = np.empty(0, np.uint64)
NONE: Places = np.empty(0, np.int64)
RUN = 4
"""Documents that are drawn together, as neighbours in the text."""


class TaskDocument(NamedTuple):
    """A document of an evaluation task: its prompt with each answer, as a model reads it, and every field's text."""

    read: Sequence[str]
    texts: Sequence[str]


@dataclass(frozen=True)
class Candidates:
    """The documents of one source: which are ``usable`` to decide, which equal a task's text, and how many to take."""

    source: str
    digests: Digests
    usable: Flags
    tasks: Flags
    held_out: int = 0
    tuning: int = 0


@dataclass(frozen=True)
class Chosen:
    """The documents of one source to train on, to hold out, and to tune on: ascending indices."""

    train: Places
    held_out: Places = field(default_factory=lambda: NONE)
    tuning: Places = field(default_factory=lambda: NONE)


def choose_documents(sources: Sequence[Candidates], excluded: Values, *, seed: int = 0) -> list[Chosen]:
    """Choose documents to hold out and to tune on: of each source, ones that equal no other document.

    They are drawn over the whole text, see `draw`. Documents for tuning have none of the digests ``excluded``. Text of
    tasks is not trained on.

    Raises:
        HfpatchError: if there are too few, or none would be left to train on.
    """
    counts = [len(source.usable) for source in sources]
    repeated, found = np.zeros(sum(counts), np.bool_), []
    if any(source.held_out or source.tuning for source in sources):
        repeated = Digests.join([source.digests for source in sources], counts).repeated(sum(counts))
    for source, own in zip(sources, np.split(repeated, np.cumsum(counts)[:-1]), strict=True):
        usable, count = source.usable & ~own, len(own)
        known = source.digests.documents[np.isin(source.digests.values, excluded)]
        taken: list[Places] = []
        for key, wanted, before, also in (
            ("data.held_out", source.held_out, 0, ""),
            ("tuning.held_out", source.tuning, source.held_out, " and in none of the tasks"),
        ):
            if wanted and before + wanted >= count:
                both = f", data.held_out {before}" if before else ""
                raise HfpatchError(
                    f"{key} is {wanted}{both} and there are {count} documents, so none is left to train on; hold fewer "
                    f"out or take more documents ({source.source})"
                )
            places = np.flatnonzero(usable)
            if len(places) < wanted:
                raise HfpatchError(
                    f"{key} is {wanted}, and of {count} documents only {len(places)} occur once in the text{also}; "
                    f"hold fewer out or take more documents ({source.source})"
                )
            taken.append(draw(places, wanted, seed=(seed, len(taken))))
            usable[[*taken[-1], *known]] = False
        deciding = np.concatenate(taken)
        train = np.setdiff1d(np.flatnonzero(~source.tasks), deciding)
        if not len(train):
            raise HfpatchError(
                f"{source.source}: all {len(source.tasks) - len(deciding)} documents to train on are in the tasks, "
                "too, so none is left; train on another text, or leave the tasks out"
            )
        found.append(Chosen(train, *taken))
    return found


def draw(places: Places, count: int, *, seed: Sequence[int], run: int = RUN) -> Places:
    """Draw ``count`` of ``places`` over their whole length, in runs of neighbours.

    The places are cut into as many equal strata as there are runs, and one run is at a random place in each. Runs show
    whether neighbours are alike, as lines of one article are. The generator is numpy's PCG64.
    """
    if count == 0:
        return NONE
    generator = np.random.Generator(np.random.PCG64(seed))
    sizes = [run] * (count // run) + [count % run] * (count % run > 0)
    bounds = len(places) * np.cumsum([0, *sizes]) // count
    starts = [
        low + int(generator.integers(high - low - size + 1))
        for size, (low, high) in zip(sizes, pairwise(bounds), strict=True)
    ]
    chosen: Places = places[
        np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    ]
    return chosen


def digest_tasks(
    tasks: Mapping[str, Iterable[TaskDocument]], digester: Digester, *, with_ids: bool = False
) -> tuple[dict[str, Digests], Values]:
    """Return digests of the texts, by task, that are not trained on, and of all texts, which are not tuned on.

    A copy of a task's document is a training document that equals its prompt with an answer, or one of its texts or
    lines of `LONG` characters. A training document that contains such a text or line is a copy, too, if only one
    document of the task has it, unlike an instruction.

    With ``with_ids`` token ids are compared, too, which token files need.
    """
    said: dict[str, list[tuple[set[str], set[str]]]] = {name: [] for name in tasks}
    for name, given in tasks.items():
        for document in given:
            # Without lone surrogates, which no tokenizer takes; the lines of texts too, as training text is often one
            # line a document.
            read, texts = ([text.encode("utf-8", "replace").decode() for text in each] for each in document)
            parts = {part for text in texts for part in (text, *text.splitlines())}
            said[name].append((set(read) - {""}, parts - {""}))
    every = {part for documents in said.values() for own in documents for part in set.union(*own)}
    known = {text: [digester.text(text)] for text in sorted(every)}
    if with_ids and known:  # which takes ten times as long
        encoded = digester.tokenizer(list(known), add_special_tokens=False, verbose=False)["input_ids"]
        for digests, ids in zip(known.values(), encoded, strict=True):
            digests.append(digester.ids(ids))
    copies = {}
    for name, documents in said.items():
        having = Counter(part for _, parts in documents for part in parts)
        copies[name] = Digests.of(
            [
                [
                    (value, len(part) >= LONG and (part in read or having[part] == 1))
                    for part in read.union(part for part in parts if len(part) >= LONG)
                    for value in known[part]
                ]
                for read, parts in documents
            ]
        )
    return copies, np.array(sorted(set(chain.from_iterable(known.values()))), np.uint64)


def copies_of_tasks(digests: Digests, count: int, tasks: Mapping[str, Digests]) -> tuple[Flags, dict[str, int]]:
    """Return which of ``count`` documents are copies of tasks' documents, and their number by task."""
    found = digests.among(Digests.join(list(tasks.values()), [0] * len(tasks)), count)
    close = digests.take(np.flatnonzero(found))
    counts = {name: int(close.among(own, count).sum()) for name, own in tasks.items()} if found.any() else {}
    return found, {name: number for name, number in counts.items() if number}


def tokenizer_documents(sources: Sequence[tuple[Corpus, DataSettings]]) -> Iterator[str]:
    """Yield the plain texts that a tokenizer may be trained on: of each source the ones that are not held out.

    Raises:
        HfpatchError: if there are too few to hold out, or the tokenizer decides which documents can be held out.
    """
    held_out: list[set[int]] = [set() for _ in sources]
    if any(settings.held_out for _, settings in sources):
        digester, candidates = Digester(), []
        for corpus, settings in sources:
            told = []
            for text in filtered_documents(corpus, settings):
                told.append([(digester.text(text), True)])
                if not settings.append_eos and len(text.split()) < 2:
                    raise HfpatchError(
                        f"data.append_eos is false, and {settings.source} has a document of one word "
                        f"({text.strip()!r}), which may be a single token and then cannot be held out; leave such out "
                        "by data.min_characters, or set data.append_eos=true"
                    )
            nothing = np.zeros(len(told), np.bool_)
            candidates.append(
                Candidates(settings.source, Digests.of(told), ~nothing, nothing, held_out=settings.held_out or 0)
            )
        chosen = choose_documents(candidates, NOTHING, seed=sources[0][1].seed)
        held_out = [set(each.held_out.tolist()) for each in chosen]
    for (corpus, settings), places in zip(sources, held_out, strict=True):
        yield from (text for place, text in enumerate(filtered_documents(corpus, settings)) if place not in places)
