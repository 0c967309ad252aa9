"""Documents of tasks, held-out documents and documents for tuning, which are kept out of the training text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from hfpatch.data.copies import LONG, Digester, Digests, Flags, Values
from hfpatch.data.corpora import Corpus, filtered_documents
from hfpatch.data.rows import Document, number_groups
from hfpatch.data.tokenizer import END_OF_TEXT, Integers
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings

NOTHING: Values = np.empty(0, np.uint64)
NONE: Integers = np.empty(0, np.int64)
RUN = 4
"""Documents that are drawn together, as neighbours in the text."""


class TaskDocument(NamedTuple):
    """A document of an evaluation task: its prompt with each answer, as a model reads it, and every field's text."""

    read: Sequence[str]
    texts: Sequence[str]


@dataclass(frozen=True)
class Candidates:
    """The documents of one source.

    Attributes:
        source: its name.
        digests: of the documents.
        usable: (documents,) which have something to predict.
        tasks: (documents,) which equal a text of a task.
        held_out: how many groups to hold out.
        tuning: how many groups to tune on.
        groups: (documents,) the group of each; None where each is one by itself.
        read: digests of the documents and of what is read of them after cutting; None if nothing is cut.
    """

    source: str
    digests: Digests
    usable: Flags
    tasks: Flags
    held_out: int = 0
    tuning: int = 0
    groups: Integers | None = None
    read: Digests | None = None


@dataclass(frozen=True)
class Chosen:
    """The documents of one source to train on, to hold out, and to tune on: ascending indices."""

    train: Integers
    held_out: Integers = field(default_factory=lambda: NONE)
    tuning: Integers = field(default_factory=lambda: NONE)


def choose_documents(
    sources: Sequence[Candidates], excluded: Values, *, seed: int = 0, by_text: bool = False
) -> tuple[list[Chosen], list[str]]:
    """Choose groups of documents to hold out and to tune on, drawn over the whole text of each source, see `draw`.

    A group has a document at least that occurs in no other group, also as it is read; ``by_text`` draws without the
    latter, as where the tokenizer is trained on the other documents. Its documents that do occur in others, or of which
    the same is read after cutting, decide nothing and are not trained on; nor do documents for tuning that have, or of
    which is read, one of the digests ``excluded``. Text of tasks is not trained on.

    Returns:
        the documents of each source, and a sentence for each use that leaves out documents of its groups.

    Raises:
        HfpatchError: if there are too few, or none would be left to train on.
    """
    counts = [len(source.usable) for source in sources]
    firsts = np.cumsum([0, *counts])
    groups = [
        np.arange(count) if source.groups is None else source.groups
        for source, count in zip(sources, counts, strict=True)
    ]
    all_groups = np.concatenate([ids + first for ids, first in zip(groups, firsts, strict=False)])
    repeated = read_alike = np.zeros(len(all_groups), np.bool_)
    if any(source.held_out or source.tuning for source in sources):
        repeated = Digests.join([source.digests for source in sources], counts).repeated(all_groups)
        read_alike = Digests.join([source.read or source.digests for source in sources], counts).repeated(all_groups)
    choices, notes = [], list[str]()
    for source, ids, first in zip(sources, groups, firsts, strict=False):
        part = slice(first, first + len(ids))
        good, alike = source.usable & ~repeated[part], read_alike[part]
        good &= by_text | ~alike
        choices.append(_choose(source, ids, good, alike, excluded, seed, notes))
    return choices, notes


def _choose(
    source: Candidates, groups: Integers, good: Flags, alike: Flags, excluded: Values, seed: int, notes: list[str]
) -> Chosen:
    """Choose the documents of one source, and add a sentence to ``notes`` for each use that leaves some out.

    ``good`` documents occur once; of ``alike`` ones the same is read as of others.
    """
    count = len(groups)
    read = source.read or source.digests
    in_tasks = np.isin(np.arange(count), read.documents[np.isin(read.values, excluded)])
    unit, total = ("documents", count) if source.groups is None else ("groups", len(np.unique(groups)))
    taken, chosen = np.zeros(count, np.bool_), list[Integers]()
    for key, wanted, before, also in (
        ("data.held_out", source.held_out, 0, ""),
        ("tuning.held_out", source.tuning, source.held_out, " and in none of the tasks"),
    ):
        if wanted and before + wanted >= total:
            both = f", data.held_out {before}" if before else ""
            raise HfpatchError(
                f"{key} is {wanted}{both} and there are {total} {unit}, so none is left to train on; hold fewer "
                f"out or take more documents ({source.source})"
            )
        left = good & ~taken & ~(in_tasks & bool(also))
        free = in_order(groups[left])
        if len(free) < wanted:
            raise HfpatchError(
                f"{key} is {wanted}, and of {total} {unit} only {len(free)} occur once in the text{also}; "
                f"hold fewer out or take more documents ({source.source})"
            )
        run = RUN if source.groups is None else 1
        inside = np.isin(groups, draw(free, wanted, seed=(seed, len(chosen)), run=run))
        kept = np.flatnonzero(inside & left & ~alike)
        if wanted and not len(kept):
            raise HfpatchError(
                f"{key}: every chosen document of {source.source} equals others once it is cut; use longer blocks "
                "(data.block_size), or score more tokens (data.scored_tokens)"
            )
        if out := int(inside.sum()) - len(kept):
            notes.append(
                f"{key}: {out} of {inside.sum()} documents of the chosen {unit} of {source.source} occur "
                "elsewhere, too, or have nothing to predict, and are left out"
            )
        chosen.append(kept)
        taken |= inside
    train = np.flatnonzero(~source.tasks & ~taken)
    if not len(train):
        raise HfpatchError(
            f"{source.source}: all {count - int(taken.sum())} documents to train on are in the tasks, "
            "too, so none is left; train on another text, or leave the tasks out"
        )
    return Chosen(train, *chosen)


def in_order(groups: Integers) -> Integers:
    """Return each group once, in the order of their first documents."""
    _, firsts = np.unique(groups, return_index=True)
    return groups[np.sort(firsts)]


def draw(indices: Integers, count: int, *, seed: Sequence[int], run: int = RUN) -> Integers:
    """Draw ``count`` of ``indices`` over their whole length, in runs of neighbours.

    The indices are cut into as many equal strata as there are runs, and one run is at a random place in each. Runs show
    whether neighbours are alike, as lines of one article are. The generator is numpy's PCG64.
    """
    if count == 0:
        return NONE
    generator = np.random.Generator(np.random.PCG64(seed))
    sizes = [run] * (count // run) + [count % run] * (count % run > 0)
    bounds = len(indices) * np.cumsum([0, *sizes]) // count
    starts = [
        low + int(generator.integers(high - low - size + 1))
        for size, (low, high) in zip(sizes, pairwise(bounds), strict=True)
    ]
    chosen: Integers = indices[
        np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    ]
    return chosen


def digest_tasks(
    tasks: Mapping[str, Iterable[TaskDocument]],
    digester: Digester,
    *,
    with_ids: bool = False,
    cuts: Collection[int] = (),
) -> tuple[dict[str, Digests], Values]:
    """Return digests of the texts, by task, that are not trained on, and of all texts, which are not tuned on.

    A copy of a task's document is a training document that equals its prompt with an answer, or one of its texts or
    lines of `LONG` characters. A training document that contains such a text or line is a copy, too, if only one
    document of the task has it, unlike an instruction.

    With ``with_ids`` token ids are compared, too, which token files need. ``cuts`` are the lengths in tokens, without
    what begins a document, to which documents are cut before a model reads them; long texts are then compared so, too.
    """
    by_task: dict[str, list[tuple[set[str], set[str]]]] = {name: [] for name in tasks}
    for name, given in tasks.items():
        for document in given:
            # Without lone surrogates, which no tokenizer takes; the lines of texts too, as training text is often one
            # line a document.
            read, texts = ([text.encode("utf-8", "replace").decode() for text in side] for side in document)
            parts = {part for text in texts for part in (text, *text.splitlines())}
            by_task[name].append((set(read) - {""}, parts - {""}))
    all_texts = {part for documents in by_task.values() for readings in documents for part in set.union(*readings)}
    by_text = {text: [digester.text(text)] for text in sorted(all_texts)}
    if with_ids and by_text:  # which takes ten times as long
        encoded = digester.tokenizer(list(by_text), add_special_tokens=False, verbose=False)["input_ids"]
        for digests, ids in zip(by_text.values(), encoded, strict=True):
            digests.append(digester.ids(ids))
    # a token has a byte or more
    long = [text for text in by_text if len(text.encode()) > min(cuts, default=sys.maxsize)]
    for text in long:
        ids = digester.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        by_text[text] += [digester.ids(ids[:cut]) for cut in cuts if len(ids) > cut]
    copies = {}
    for name, documents in by_task.items():
        having = Counter(part for _, parts in documents for part in parts)
        copies[name] = Digests.of(
            [
                [
                    (value, len(part) >= LONG and (part in read or having[part] == 1))
                    for part in read.union(part for part in parts if len(part) >= LONG)
                    for value in by_text[part]
                ]
                for read, parts in documents
            ]
        )
    return copies, np.array(sorted(set(chain.from_iterable(by_text.values()))), np.uint64)


def copies_of_tasks(digests: Digests, count: int, tasks: Mapping[str, Digests]) -> tuple[Flags, dict[str, int]]:
    """Return which of ``count`` documents are copies of tasks' documents, and their number by task."""
    copied = digests.among(Digests.join(list(tasks.values()), [0] * len(tasks)), count)
    close = digests.take(np.flatnonzero(copied))
    counts = {name: int(close.among(other, count).sum()) for name, other in tasks.items()} if copied.any() else {}
    return copied, {name: number for name, number in counts.items() if number}


def tokenizer_documents(sources: Sequence[tuple[Corpus, DataSettings]]) -> Iterator[str]:
    """Yield the plain texts that a tokenizer may be trained on: of each source the ones that are not held out.

    A text that is the end-of-text token is left out, as the model's text leaves out documents of one token.

    Raises:
        HfpatchError: if there are too few to hold out, or the tokenizer decides which documents can be held out.
    """

    def longer(corpus: Corpus, settings: DataSettings) -> Iterator[Document]:
        return (document for document in filtered_documents(corpus, settings) if document.text != END_OF_TEXT)

    held_out: list[set[int]] = [set() for _ in sources]
    if any(settings.held_out for _, settings in sources):
        digester, candidates = Digester(), []
        for corpus, settings in sources:
            digests, names = [], []
            for text, group in longer(corpus, settings):
                digests.append([(digester.text(text), True)])
                names.append(group)
                if not settings.append_eos and len(text.split()) < 2:
                    raise HfpatchError(
                        f"data.append_eos is false, and {settings.source} has a document of one word "
                        f"({text.strip()!r}), which may be a single token and then cannot be held out; leave it out by "
                        "data.min_characters, or set data.append_eos=true"
                    )
            nothing = np.zeros(len(digests), np.bool_)
            groups = None if settings.group is None else number_groups(names)
            held = settings.held_out or 0
            candidates.append(
                Candidates(settings.source, Digests.of(digests), ~nothing, nothing, held_out=held, groups=groups)
            )
        chosen, _ = choose_documents(candidates, NOTHING, seed=sources[0][1].seed)
        held_out = [
            set(range(len(source.usable))) - set(choice.train.tolist())
            for source, choice in zip(candidates, chosen, strict=True)
        ]
    for (corpus, settings), indices in zip(sources, held_out, strict=True):
        documents = enumerate(longer(corpus, settings))
        yield from (document.text for index, document in documents if index not in indices)
