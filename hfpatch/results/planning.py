"""The variances that an earlier comparison has stored, for planning another one.

A difference of the earlier run has the errors ``e₂`` over documents and ``e₁`` over seeds. In the new one ``e₂`` goes
with one over the root of its documents, ``e₁`` with that of its seeds. How much of ``e₁`` is of documents is not known;
with fewer of them all of it is taken to be, so that the answer is rather too careful
(:class:`hfpatch.results.decision.Design`).
"""

from __future__ import annotations

from hfpatch.recipes.questions import Asked
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import ALPHA
from hfpatch.results.parts import Comparison


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
