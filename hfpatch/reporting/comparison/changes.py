"""Differences and gains of a comparison in the units in which they are reported."""

from __future__ import annotations

import math
from statistics import fmean

from hfpatch.reporting.numbers import Change, Scale, change, scale_of
from hfpatch.results.cautions import level_at
from hfpatch.results.low_noise import LOW_NOISE
from hfpatch.results.schema import Comparison, ComparisonResults
from hfpatch.results.verdicts import Verdict


def higher_is_better(results: ComparisonResults, task: str, metric: str) -> bool:
    """Say in which direction a metric of a task is better."""
    info = results.tasks.get(task)
    return LOW_NOISE.get(metric, info.higher_is_better if info else True)


def scale_in(results: ComparisonResults, task: str, metric: str) -> Scale:
    """Return the scale in which differences of a task's metric are reported."""
    return scale_of(metric, higher_is_better(results, task, metric))


def change_of(results: ComparisonResults, found: Verdict | Comparison, *, plain: bool = True) -> Change:
    """Return a difference in the unit in which it is reported.

    Args:
        results: the results that it is part of.
        found: a verdict, or a comparison by any measure.
        plain: with the 95 % interval of this difference alone, or of a verdict with the simultaneous one.
    """
    other = found.other if isinstance(found, Verdict) else found.reference
    ends, visible = (found.low, found.high), None
    if isinstance(found, Verdict):
        visible = found.smallest_visible
        ends = ends if plain else (found.simultaneous_low, found.simultaneous_high)
    values = results.values(other, found.task, found.metric) if found.task in results.tasks else []
    scale = scale_in(results, found.task, found.metric)
    return change(found.difference, *ends, visible, scale=scale, reference=fmean(values) if values else None)


def gain_of(results: ComparisonResults, verdict: Verdict) -> Change | None:
    """Return a difference as a gain, above 0 is better, with its simultaneous interval; None if nothing is known."""
    if math.isnan(verdict.difference):
        return None
    found = change_of(results, verdict, plain=False)
    return found if verdict.higher_is_better else found.turned


def verdict_text(results: ComparisonResults, verdict: Verdict) -> str:
    """Return a verdict in words: with why nothing was tested, or that the reference is at floor or at chance."""
    if verdict.why:
        return f"{verdict.verdict} ({verdict.why})"
    info = results.tasks.get(verdict.task)
    if verdict.verdict == "no difference shown" and info is not None and verdict.metric == info.primary:
        level = level_at(results, verdict.other, verdict.task)
        return f"{verdict.verdict} ({verdict.other} {level})" if level else verdict.verdict
    return verdict.verdict
