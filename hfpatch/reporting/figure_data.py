"""The numbers behind each figure as CSV, for those who want to draw it again."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from hfpatch.reporting.curves import Curve
from hfpatch.reporting.layers import LayerSeries
from hfpatch.reporting.results import Results

_MOST_STEPS = 500


def csv_text(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV; None becomes an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    return text.getvalue()


def differences_csv(results: Results) -> str:
    """Return every paired comparison, in the metrics' own units."""
    fields = [
        "method",
        "reference",
        "task",
        "metric",
        "difference",
        "low",
        "high",
        "p",
        "p_holm",
        "smallest_visible",
        "n",
        "seeds",
        "test",
        "verdict",
    ]
    return csv_text(fields, ([getattr(each, field) for field in fields] for each in results.comparisons))


def quality_csv(results: Results) -> str:
    """Return each method's trainable parameters and its primary metric of every task and seed."""
    rows = (
        [name, method.trainable, task, info.primary, seed, run.evaluation[task].metrics.get(info.primary)]
        for name, method in results.methods.items()
        for task, info in results.tasks.items()
        for seed, run in sorted(method.runs.items())
        if task in run.evaluation
    )
    return csv_text(("method", "trainable", "task", "metric", "seed", "value"), rows)


def training_csv(curves: Mapping[str, Curve]) -> str:
    """Return the loss of every method, at most 500 steps of each."""
    rows = (
        [name, int(curve.steps[i]), float(curve.loss[i])]
        for name, curve in curves.items()
        for i in range(0, len(curve.steps), -(-len(curve.steps) // _MOST_STEPS))
    )
    return csv_text(("method", "step", "loss"), rows)


def layers_csv(series: Sequence[LayerSeries]) -> str:
    """Return every series, a line a layer."""
    rows = (
        [each.quantity, each.method, each.group, layer, value, each.reference]
        for each in series
        for layer, value in sorted(each.points.items())
    )
    return csv_text(("quantity", "method", "group", "layer", "value", "reference"), rows)
