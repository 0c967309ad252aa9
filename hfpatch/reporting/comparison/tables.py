"""The units in which a comparison's differences are reported."""

from __future__ import annotations

from statistics import fmean

from hfpatch.reporting.numbers import Change, Scale, change, scale_of
from hfpatch.results.schema import Comparison, ComparisonResults


def scale_of_task(results: ComparisonResults, task: str) -> Scale:
    """Return the scale of a task's primary metric."""
    info = results.tasks[task]
    return scale_of(info.primary, info.higher_is_better)


def change_of(results: ComparisonResults, comparison: Comparison) -> Change:
    """Return a comparison's difference in the unit in which its metric is reported."""
    info = results.tasks.get(comparison.task)
    values = results.values(comparison.reference, comparison.task, comparison.metric) if info else []
    return change(
        comparison.difference,
        comparison.low,
        comparison.high,
        comparison.smallest_visible,
        scale=scale_of(comparison.metric, info.higher_is_better if info else True),
        reference=fmean(values) if values else None,
    )
