"""Paired comparisons of methods, from the per-document records that evaluations wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.metrics import Array, Metric, metric_named
from hfpatch.evaluation.results import TaskResult
from hfpatch.evaluation.stats import (
    Estimate,
    bootstrap_interval,
    holm,
    mcnemar_p,
    over_documents,
    over_seeds_and_documents,
    permutation_p,
    smallest_visible,
    student_interval,
    student_p,
)

ALPHA = 0.05
_FEWEST_DISCORDANT = 6  # with 5 documents all changed one way, the exact McNemar p is still 0.0625

Runs = Mapping[int, Path]


@dataclass(frozen=True)
class Comparison:
    """The difference of a method from a reference on one task, all numbers in the metric's own unit.

    Attributes:
        method: the method.
        reference: what it is held against.
        task: the task.
        metric: the task's primary metric.
        n: documents.
        seeds: seeds of the method.
        difference: method minus reference; for a perplexity ``reference · (exp(mean log ratio) - 1)``.
        low: lower end of the 95 % interval; of one seed by bootstrap over documents, of several by Student's t with
            seeds and documents as random effects.
        high: upper end of that interval.
        p: two-sided p-value of no difference, by ``test``.
        p_holm: ``p`` corrected over the tasks of this method and reference.
        test: the name of the test.
        smallest_visible: the true difference that had a chance of 80 % to be found at 5 % with this sample, before
            correction; None where one document cannot tell.
        verdict: whether the difference stands after correction, and which way it goes.
    """

    method: str
    reference: str
    task: str
    metric: str
    n: int
    seeds: int
    difference: float
    low: float
    high: float
    p: float
    p_holm: float
    test: str
    smallest_visible: float | None
    verdict: Literal["better", "worse", "within noise"]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as what JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class _Table:
    """Both models' terms, each (seeds, documents), and the documents' weights."""

    method: Array
    reference: Array
    weights: Array

    @property
    def difference(self) -> Array:
        return self.method - self.reference

    @property
    def reference_ratio(self) -> float:
        return float((self.reference.sum(axis=1) / self.weights.sum()).mean())


def compare(
    records: Mapping[str, Runs],
    *,
    tasks: Mapping[str, TaskResult],
    references: Mapping[str, Sequence[str]],
) -> list[Comparison]:
    """Compare methods document by document.

    A reference with one run only (a baseline has no seed) is paired with every seed of the method; otherwise runs are
    paired by seed, and those seeds count that both have.

    Args:
        records: for each method and seed the folder with ``<task>.jsonl`` records.
        tasks: any run's result of each task; it names the primary metric and its direction.
        references: for each method the methods to hold it against.

    Returns:
        One comparison for each method, reference and task, in that order.

    Raises:
        HfpatchError: if a record is missing or broken, or two runs were not scored on the same documents.
    """
    found = []
    for method, others in references.items():
        for reference in others:
            runs = _paired(records, method, reference)
            family = [_compare(method, reference, result, runs) for result in tasks.values()]
            corrected = holm([comparison.p for comparison in family])
            directions = [_metric(result).higher_is_better for result in tasks.values()]
            found += [_judged(*three) for three in zip(family, corrected, directions, strict=True)]
    return found


def _paired(records: Mapping[str, Runs], method: str, reference: str) -> list[tuple[Path, Path]]:
    ours, theirs = records[method], records[reference]
    if len(theirs) == 1:
        return [(ours[seed], next(iter(theirs.values()))) for seed in sorted(ours)]
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        raise HfpatchError(f"{method} and {reference} have no seed in common; run both with the same seeds")
    return [(ours[seed], theirs[seed]) for seed in seeds]


def _metric(result: TaskResult) -> Metric:
    return metric_named(result.primary, higher_is_better=result.higher_is_better)


def _compare(method: str, reference: str, result: TaskResult, runs: Sequence[tuple[Path, Path]]) -> Comparison:
    """Return the comparison on one task, not yet corrected over tasks."""
    metric = _metric(result)
    table = _read_table(result, metric, runs)
    test, p, interval, estimate = _test(table, metric)
    base = table.reference_ratio
    low, high = (metric.shift(base, end) for end in interval)
    seeds, documents = table.method.shape
    return Comparison(
        method=method,
        reference=reference,
        task=result.task,
        metric=result.primary,
        n=documents,
        seeds=seeds,
        difference=metric.shift(base, estimate.difference),
        low=low,
        high=high,
        p=p,
        p_holm=p,
        test=test,
        smallest_visible=_visible(table, metric, estimate) if documents > 1 else None,
        verdict="within noise",
    )


def _test(table: _Table, metric: Metric) -> tuple[str, float, tuple[float, float], Estimate]:
    """Return the test's name, its p-value, and the interval and the estimate in units of the ratio."""
    seeds, documents = table.method.shape
    difference = table.difference
    if documents == 1:
        value = float(difference.mean() / table.weights[0])
        return "none (one document)", 1.0, (value, value), Estimate(value, error=0.0, freedom=math.inf)
    if seeds > 1:
        estimate = over_seeds_and_documents(difference, table.weights)
        name = "paired t over seeds and documents"
        return name, student_p(estimate), student_interval(estimate), estimate
    estimate = over_documents(difference[0], table.weights)
    interval = bootstrap_interval(difference[0], table.weights)
    if _is_accuracy(table):
        p, name = mcnemar_p(table.method[0], table.reference[0]), "McNemar exact"
    else:
        p, name = permutation_p(difference[0]), "paired permutation" + (" of log ratios" if metric.exponential else "")
    return name, p, interval, estimate


def _is_accuracy(table: _Table) -> bool:
    return all(bool(np.isin(values, (0.0, 1.0)).all()) for values in (table.method, table.reference)) and bool(
        (table.weights == 1).all()
    )


def _visible(table: _Table, metric: Metric, estimate: Estimate) -> float:
    """Return the smallest visible difference; for an accuracy never less than the fewest documents that can tell."""
    floor = _FEWEST_DISCORDANT / table.weights.sum() if _is_accuracy(table) else 0.0
    return float(metric.shift(table.reference_ratio, max(smallest_visible(estimate), floor)))


def _judged(comparison: Comparison, p_holm: float, higher_is_better: bool) -> Comparison:
    verdict: Literal["better", "worse", "within noise"] = "within noise"
    if p_holm < ALPHA:
        verdict = "better" if (comparison.difference > 0) == higher_is_better else "worse"
    return replace(comparison, p_holm=p_holm, verdict=verdict)


def _read_table(result: TaskResult, metric: Metric, runs: Sequence[tuple[Path, Path]]) -> _Table:
    """Read one task's records of all paired runs, which must be of the same documents."""
    cache = {folder: _read(folder / f"{result.task}.jsonl", result.primary) for pair in runs for folder in pair}
    first = next(iter(cache))
    hashes, values = cache[first]
    weights = metric.ratio_terms(values)[1]
    for folder, (others, numbers) in cache.items():
        if others != hashes or not np.array_equal(metric.ratio_terms(numbers)[1], weights):
            raise HfpatchError(f"{folder} and {first}: {result.task} was scored on other documents; evaluate both anew")
    terms = {folder: metric.ratio_terms(numbers)[0] for folder, (_, numbers) in cache.items()}
    ours, theirs = (np.stack([terms[pair[side]] for pair in runs]) for side in (0, 1))
    return _Table(ours, theirs, weights)


def _read(path: Path, metric: str) -> tuple[list[str], list[Any]]:
    """Return the documents' hashes and their values of a metric."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [row["doc_hash"] for row in rows], [row[metric] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HfpatchError(f"{path}: not a record of {metric} ({error!r}); evaluate this run anew") from error
