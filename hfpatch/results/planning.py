"""What a planned comparison can decide, from the variances that an earlier one has stored.

A difference of the earlier run has the errors ``e₂`` over documents and ``e₁`` over seeds. In the new one ``e₂`` goes
with one over the root of its documents, ``e₁`` with that of its seeds. How much of ``e₁`` is of documents is not known;
with fewer of them all of it is taken to be, so that the answer is rather too careful
(:class:`hfpatch.results.decision.Design`).
"""

from __future__ import annotations

from typing import NamedTuple

from hfpatch.recipes.questions import Asked, PrimaryName
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import ALPHA, FEWEST_DOCUMENTS, Design, fewest
from hfpatch.results.parts import Comparison

_MOST_SEEDS = 100  # of a design that is looked for
_MOST_TIMES = 4.0  # as many documents as the recipe has, at most


class Cheapest(NamedTuple):
    """The seeds and documents, or groups of them, that take least time, and how long they take."""

    seeds: int
    documents: int
    seconds: float


def stored_for(results: ComparisonResults, pair: tuple[str, str], task: str, *, with_base: bool) -> Comparison | None:
    """Return a stored difference with several paired seeds: of the same pair, else the pair with the median error.

    Args:
        results: the earlier comparison.
        pair: the method and the other.
        task: the task or text.
        with_base: whether the other is the base, as in ``keep``; only such pairs are alike.
    """
    changes = results.retention.changes if results.retention is not None else []
    measure = results.deciding.get(task)
    metric = measure.metric if measure is not None else "bits_per_byte"
    alike = [
        one
        for one in (*results.comparisons, *changes)
        if (one.task, one.metric) == (task, metric)
        and (one.reference == results.base) == with_base
        and len(one.errors) > 1
        and "not paired" not in one.test
    ]
    ranked = sorted(alike, key=lambda one: sum(error**2 for error, _ in one.errors))
    median = ranked[len(ranked) // 2] if ranked else None
    return next((one for one in alike if one.pair == pair), median)


def level_of(asked: Asked, part: float = 1.0) -> float:
    """Return the level of one of a question's pairs, at a look with so large a part of it."""
    return ALPHA * part / asked.tests


def cheapest(
    design: Design, name: PrimaryName, level: float, margin: float, documents: int, seconds: tuple[float, float]
) -> Cheapest | None:
    """Return the cheapest seeds and documents with which equal methods are decided in 80 % of cases, or None.

    Args:
        design: that of ``documents``.
        name: the question.
        level: of one pair.
        margin: the largest difference that does not matter.
        documents: of the recipe; up to four times as many are tried.
        seconds: of one seed, without the documents, and of all these documents.
    """
    best: Cheapest | None = None
    most, (fixed, of_documents) = max(FEWEST_DOCUMENTS, round(_MOST_TIMES * documents)), seconds
    for seeds in range(2, _MOST_SEEDS + 1):
        if best is not None and seeds * (fixed + of_documents * FEWEST_DOCUMENTS / documents) >= best.seconds:
            break  # more seeds take longer
        with_documents = design.with_seeds(seeds).with_documents
        number = fewest(with_documents, (name, 0.0, level, margin), above=FEWEST_DOCUMENTS - 1, most=most)
        if number is not None:
            taken = Cheapest(seeds, number, seeds * (fixed + of_documents * number / documents))
            best = taken if best is None else min(best, taken, key=lambda choice: choice.seconds)
    return best
