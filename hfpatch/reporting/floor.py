"""A base that scores nothing, or no better than guessing: a task on which methods cannot be distinguished.

That no difference is shown says nothing there of the methods. A difference that is found is one wherever the base is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from hfpatch.reporting.numbers import Scale, scale_of
from hfpatch.results.schema import ComparisonResults, TaskResult

Level = Literal["at floor", "at chance"]

FLOOR = 0.01
"""The share of right answers up to which a base is at floor."""
_Z = 1.645
"""One-sided at 5 %: how many standard errors above guessing a base must be."""


def level_of(score: TaskResult | None) -> Level | None:
    """Say whether a base's primary metric is at floor or at chance; None if neither, or where that is not known.

    At floor: a share of at most :data:`FLOOR`. At chance: a share p of n documents (or groups of them) with
    p <= c + 1.645 sqrt(c(1 - c)/n), c the share that guessing gets.
    """
    if score is None or not score.higher_is_better or scale_of(score.primary, True) is not Scale.POINTS:
        return None
    value, units = score.metrics.get(score.primary), score.clusters.groups if score.clusters else score.n
    if value is None or not units:
        return None
    if value <= FLOOR:
        return "at floor"
    chance = score.chance
    if chance is not None and value <= chance + _Z * math.sqrt(chance * (1 - chance) / units):
        return "at chance"
    return None


def level_at(results: ComparisonResults, method: str | None, task: str) -> Level | None:
    """Say whether a method, such as the baseline, is at floor or at chance on a task with every seed."""
    runs = results.methods[method].runs.values() if method in results.methods else ()
    levels = {level_of(run.evaluation.get(task)) for run in runs}
    return levels.pop() if len(levels) == 1 else None


def floor_cautions(scores: Mapping[str, TaskResult], name: str = "the base") -> Iterator[str]:
    """Yield a sentence for each task on which ``name`` is at floor or at chance."""
    for task, score in scores.items():
        level, value = level_of(score), score.metrics.get(score.primary, 0.0)
        right = f"{score.primary}: {100 * value:.3g} % of {score.n:,} documents"
        if level == "at chance":
            right += f", guessing gets {100 * (score.chance or 0):.3g} %"
            why = "the task measures little of this model"
        else:
            why = "a method that changes nothing and one that does harm look the same"
        if level is not None:
            alike = "so equal scores there do not show that methods are alike"
            yield f"{name} is {level} on {task} ({right}): {why}, {alike}."


def baseline_cautions(results: ComparisonResults) -> Iterator[str]:
    """Yield a sentence for each task on which the baseline is at floor or at chance.

    The scores are those of its first run: seeds change nothing in a base.
    """
    method = results.methods.get(results.baseline) if results.baseline is not None else None
    runs = sorted(method.runs.items()) if method is not None else []
    yield from floor_cautions(runs[0][1].evaluation) if runs else ()


def warned_of_floor(results: ComparisonResults) -> list[str]:
    """Return a run's warnings, with those of floor and chance that results of older versions do not have."""
    return [*dict.fromkeys([*results.warnings, *baseline_cautions(results)])]
