"""``results.csv``: every number of every run, one a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hfpatch.reporting.figure_data import csv_text
from hfpatch.reporting.results import Results, TaskOutcome

COLUMNS = ("method", "seed", "task", "metric", "value", "stderr", "n", "trainable")


def results_csv(runs: Results | Mapping[str, Results]) -> str:
    """Return a run in long format, with a header; empty fields where a number is not known.

    Of several runs, by label, the first column says which.
    """
    if isinstance(runs, Results):
        return csv_text(COLUMNS, _rows(runs))
    if len(runs) == 1:
        return results_csv(next(iter(runs.values())))
    return csv_text(("run", *COLUMNS), ((label, *row) for label, each in runs.items() for row in _rows(each)))


def _rows(results: Results) -> Iterator[tuple[object, ...]]:
    for name, method in results.methods.items():
        for seed, run in sorted(method.runs.items()):
            for task, outcome in run.evaluation.items():
                for metric, value, error in _metrics(outcome):
                    yield name, seed, task, metric, value, error, outcome.n, method.trainable


def _metrics(outcome: TaskOutcome) -> Iterator[tuple[str, float, float | None]]:
    for metric, value in outcome.metrics.items():
        yield metric, value, outcome.stderr.get(metric)
