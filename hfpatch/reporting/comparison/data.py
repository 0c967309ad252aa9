"""The numbers of a comparison as CSV: all of them, and those behind each figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hfpatch.reporting.comparison.retention import retention_csv
from hfpatch.reporting.tabular import csv_text
from hfpatch.results.parts import HELD_OUT
from hfpatch.results.schema import ComparisonResults, LayerSeries

_SCORES = ("method", "seed", "task", "metric", "value", "stderr", "n", "trainable")
_PLAIN = ("difference", "low", "high", "p", "test")
_DECIDED = ("question", "simultaneous_low", "simultaneous_high", "p_corrected", "family", "smallest_visible", "verdict")
_DIFFERENCES = ("method", "other", "task", "metric", *_PLAIN, *_DECIDED, "why", "n", "seeds")
_OF_PAIR = ("other", *_PLAIN, *_DECIDED, "why")
_GROUPS = ("groups", "grouped_by")
_RESULTS = (*_SCORES, *_OF_PAIR, *_GROUPS)
_LOSS = "held_out_loss"
_FEWEST_STEPS, _MOST_STEPS, _MOST_LINES = 50, 500, 40_000

Layers = Sequence[tuple[str, LayerSeries]]
"""Method and series, in the order of the report."""


def results_csv(runs: Mapping[str, ComparisonResults]) -> str:
    """Return every number of every run in long format, and below them every paired difference.

    A row of a difference has no ``seed`` and no ``value``; its columns are those from ``other`` to ``why``, which are
    empty in all other rows. Those after ``test`` are the verdict's, which the measures that decide have alone. The loss
    on held-out text is a metric without a task where its documents were not compared. The last columns say in how many
    groups a task's documents come, and by which of their columns. Of several runs, by label, the first column says
    which.
    """
    if len(runs) == 1:
        return csv_text(_RESULTS, _rows(next(iter(runs.values()))))
    return csv_text(("run", *_RESULTS), ((label, *row) for label, each in runs.items() for row in _rows(each)))


def _rows(results: ComparisonResults) -> Iterator[tuple[object, ...]]:
    no_pair = (None,) * len(_OF_PAIR)
    for name, method in results.methods.items():
        losses = method.held_out_losses
        if name == results.baseline and results.base_loss is not None:
            losses = {**dict.fromkeys(method.runs, results.base_loss), **losses}
        for seed, run in sorted(method.runs.items()):
            for task, score in run.evaluation.items():
                groups = (None, None) if score.clusters is None else (score.clusters.groups, score.clusters.column)
                for metric, value in score.metrics.items():
                    scored = (seed, task, metric, value, score.stderr.get(metric), score.n, method.trainable)
                    yield name, *scored, *no_pair, *groups
            if seed in losses and HELD_OUT not in run.evaluation:
                held_out = (seed, None, _LOSS, losses[seed], None, None, method.trainable)
                yield name, *held_out, *no_pair, None, None
    for pair in _pairs(results):
        trainable = results.methods[str(pair["method"])].trainable
        named = (pair["method"], None, pair["task"], pair["metric"], None, None, pair["n"], trainable)
        yield *named, *(pair.get(key) for key in _OF_PAIR), None, None


def _pairs(results: ComparisonResults) -> Iterator[dict[str, object]]:
    """Yield every paired difference: those with verdicts, then those by measures that decide nothing."""
    for each in results.verdicts:
        if each.task in results.tasks and each.method in results.methods:
            yield each.to_json()
    for one in results.comparisons:
        if one.task in results.tasks and results.deciding[one.task].metric != one.metric:
            yield {**one.to_json(), "other": one.reference}


def figure_csv(name: str, results: ComparisonResults, layers: Layers) -> str:
    """Return the data of the figure called ``name``."""
    match name:
        case "differences":
            return csv_text(_DIFFERENCES, ([pair.get(key) for key in _DIFFERENCES] for pair in _pairs(results)))
        case "quality":
            values = (
                (name, method.trainable, task, info.primary, seed, run.evaluation[task].metrics.get(info.primary))
                for name, method in results.methods.items()
                for task, info in results.tasks.items()
                for seed, run in sorted(method.runs.items())
                if task in run.evaluation
            )
            return csv_text(("method", "trainable", "task", "metric", "seed", "value"), values)
        case "retention":
            return retention_csv(results)
        case "training":
            return csv_text(("method", "step", "loss", "seeds", "held_out"), _training(results))
        case _:
            headings = ("quantity", "method", "group", "layer", "value", "reference")
            rows = (
                (each.quantity, method, each.group, layer, value, each.reference)
                for method, each in layers
                for layer, value in sorted(each.points.items())
            )
            return csv_text(headings, rows)


def _training(results: ComparisonResults) -> Iterator[tuple[object, ...]]:
    """Yield the loss of every method, at most 500 steps of each, fewer where there are many methods."""
    curves = {name: method.curve for name, method in results.methods.items() if method.curve is not None}
    most = max(_FEWEST_STEPS, min(_MOST_STEPS, _MOST_LINES // max(1, len(curves))))
    for name, curve in curves.items():
        every = -(-len(curve.steps) // most)
        for place, (step, loss) in enumerate(zip(curve.steps, curve.loss, strict=True)):
            if place % every == 0 or step in curve.held_out:
                yield name, step, loss, curve.seeds, curve.held_out.get(step)
