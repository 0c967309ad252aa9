"""``results.csv``: every number of every run, one a line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from hfpatch.reporting.results import Results, TaskOutcome

COLUMNS = ("method", "seed", "task", "metric", "value", "stderr", "n", "trainable")


def results_csv(results: Results) -> str:
    """Return the run in long format, with a header; empty fields where a number is not known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_rows(results))
    return text.getvalue()


def _rows(results: Results) -> Iterator[tuple[object, ...]]:
    for name, method in results.methods.items():
        for seed, run in sorted(method.runs.items()):
            for task, outcome in run.evaluation.items():
                for metric, value, error in _metrics(outcome):
                    yield name, seed, task, metric, value, error, outcome.n, method.trainable


def _metrics(outcome: TaskOutcome) -> Iterator[tuple[str, float, float | None]]:
    for metric, value in outcome.metrics.items():
        yield metric, value, outcome.stderr.get(metric)
