"""Paired comparisons of methods, from the per-document records that evaluations wrote."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfpatch.errors import HfpatchError, first_line
from hfpatch.evaluation.clusters import Groups, count_groups, unit_sums
from hfpatch.evaluation.dependence import Neighbours, find_dependence, residuals
from hfpatch.evaluation.metrics import Aggregation, Array, metric_of
from hfpatch.evaluation.reading import Pair, Records, read_metric
from hfpatch.evaluation.stats import (
    Estimate,
    Part,
    mean_difference,
    over_both,
    over_seeds,
    paired_accuracies,
    paired_permutation,
)
from hfpatch.results.decision import FEWEST_DOCUMENTS
from hfpatch.results.low_noise import BITS_PER_BYTE, LOW_NOISE
from hfpatch.results.parts import Clusters, Comparison, TaskResult
from hfpatch.results.verdicts import within

RESAMPLES = 200  # of which a standard error is known to 5 %


class _Tested(NamedTuple):
    """The result of a test, in units of the ratio, or of the score if that is no ratio."""

    test: str
    p: float
    interval: tuple[float, float]
    parts: tuple[Part, ...]


_Resamples = dict[tuple[str, str, Path], Array]
"""The scores of runs on resamples, by task, metric and run; all pairs of a run share them."""


def compare(
    records: Records,
    tasks: Mapping[str, TaskResult],
    references: Mapping[str, Collection[str]],
    *,
    without_low_noise: Collection[str] = (),
    left_out: Collection[tuple[str, str]] = (),
) -> list[Comparison]:
    """Compare methods document by document, by the primary metric of each task and by its low-noise metrics.

    Corrections for several tests are left to :func:`hfpatch.results.verdicts.judge`.

    Args:
        records: the records of all runs.
        tasks: any run's result of each task; it names the primary metric, its direction, and the low-noise metrics.
        references: for each method the methods to compare it with, see `Records.pairs`.
        without_low_noise: tasks that are compared by their primary metric alone.
        left_out: tasks with a metric by which they are not compared.

    Returns:
        One comparison for each method, reference, task and metric, primary metrics first; none with a method without
        runs, and none by low-noise metrics where their values are not all finite (an answer is impossible).

    Raises:
        HfpatchError: if a record is missing or broken, or two runs were not scored on the same documents.
    """
    low_noise, of_text = list[TaskResult](), dict(tasks)  # by bits per byte where a task has them
    for name, higher in LOW_NOISE.items():
        for task, result in tasks.items():
            if name not in result.metrics or task in without_low_noise:
                continue
            chosen = result.model_copy(update={"primary": name, "higher_is_better": higher})
            if name == BITS_PER_BYTE:
                of_text[task] = chosen
            if name != result.primary and records.metric(chosen).aggregate is None:  # else a task's own of another kind
                low_noise.append(chosen)
    measures, of_texts = (
        [result for result in results if (result.task, result.primary) not in left_out]
        for results in ([*tasks.values(), *low_noise], of_text.values())
    )
    made = compare_by(records, measures, references, find_dependent(records, of_texts, references))
    primary = [one for one in made if one.metric == tasks[one.task].primary]
    others = [one for one in made if one.metric != tasks[one.task].primary]
    broken = {(one.method, one.reference, one.task) for one in others if not math.isfinite(one.difference)}
    return primary + [one for one in others if (one.method, one.reference, one.task) not in broken]


def compare_by(
    records: Records,
    measures: Sequence[TaskResult],
    references: Mapping[str, Collection[str]],
    dependent: Mapping[str, Neighbours],
) -> list[Comparison]:
    """Compare each method with each of its references by the primary metric of each result.

    ``dependent`` are the tasks whose neighbouring documents vary together, see `find_dependent`.
    """
    resamples: _Resamples = {}
    return [
        _compare(records, pair, result, dependent.get(result.task), resamples)
        for pair in records.pairs(references)
        for result in measures
    ]


def find_dependent(
    records: Records, measures: Iterable[TaskResult], references: Mapping[str, Collection[str]]
) -> dict[str, Neighbours]:
    """Return the tasks whose neighbouring documents, or declared groups of them, vary together.

    It is asked of the differences of all pairs, by the primary metric of each result, if that is a mean or ratio of the
    documents.

    Raises:
        HfpatchError: as `compare`.
    """
    ratios = [(result, metric) for result in measures if (metric := records.metric(result)).aggregate is None]

    # The residuals of each pair, in units of documents or of the groups that were declared
    differences: dict[str, list[Array]] = {}
    for pair in records.pairs(references):
        for result, metric in ratios:
            values = records.read_runs(result, [*pair.ours, *pair.theirs])
            terms = {run: metric.ratio_terms(numbers) for run, numbers in values.items()}
            ours, theirs = (np.stack([terms[run][0] for run in side]) for side in (pair.ours, pair.theirs))
            groups = records.read_groups(pair.ours[0], result)
            difference = unit_sums(mean_difference(ours, theirs), groups)
            if len(difference) >= FEWEST_DOCUMENTS and np.isfinite(difference).all():
                weights = unit_sums(terms[pair.ours[0]][1], groups)
                differences.setdefault(result.task, []).append(residuals(difference, weights))
    dependent = {}
    for task, rows in differences.items():
        tested = find_dependence(np.stack(rows))
        if tested is not None and tested.alarms:
            dependent[task] = Neighbours.of(tested, len(rows[0]))
    return dependent


def check_comparable(
    folder: Path, tasks: Mapping[str, TaskResult], functions: Mapping[str, Mapping[str, Aggregation]]
) -> None:
    """Check that each task's primary score can be computed from a run's records, as a comparison by it needs.

    Raises:
        HfpatchError: with the task and the metric for which it cannot.
    """
    for task, result in tasks.items():
        metric, name = metric_of(result, functions.get(task, {})), result.primary
        values, reason, cause = read_metric(folder / f"{task}.jsonl", name)[1], "", None
        try:
            score = metric.overall(values)
            if not math.isclose(score, result.metrics[name], rel_tol=1e-6, abs_tol=1e-9):
                reason = f"they give {score:.6g}, lm-eval {result.metrics[name]:.6g}"
        except (ArithmeticError, TypeError, ValueError, AttributeError, LookupError) as error:
            reason, cause = first_line(error, kind=True), error
        if reason:
            raise HfpatchError(
                f"task {task}: its metric {name} does not follow from the documents' recorded values, so methods "
                f"cannot be compared by it ({reason}); leave out the task or use another metric"
            ) from cause


def _compare(
    records: Records, pair: Pair, result: TaskResult, neighbours: Neighbours | None, resamples: _Resamples
) -> Comparison:
    """Return the comparison by one measure, not yet corrected."""
    metric, values = records.metric(result), records.read_runs(result, [*pair.ours, *pair.theirs])
    documents = len(values[pair.ours[0]])
    groups, clusters = records.read_groups(pair.ours[0], result), result.clusters
    if neighbours is not None:
        groups, column = neighbours.runs(documents, groups), "" if clusters is None else clusters.column
        clusters = Clusters(column=column, groups=count_groups(groups), run=neighbours.run, p=neighbours.p)
    units = documents if groups is None else count_groups(groups)
    enough, tested = units >= FEWEST_DOCUMENTS, None
    if metric.aggregate is None:
        terms = {run: metric.ratio_terms(numbers) for run, numbers in values.items()}
        ours, theirs = (np.stack([terms[run][0] for run in side]) for side in (pair.ours, pair.theirs))
        weights = terms[pair.ours[0]][1]
        with np.errstate(over="ignore", invalid="ignore"):  # values may be infinite, or their sums
            base = float((theirs.sum(axis=1) / weights.sum()).mean())
            difference = float(mean_difference(ours, theirs).sum() / weights.sum())
        if enough and math.isfinite(base) and math.isfinite(difference):
            tested = _test_ratio(pair, ours, theirs, weights, groups, of_logs=metric.exponential)
    else:
        scores = [np.array([metric.aggregate(values[run]) for run in side]) for side in (pair.ours, pair.theirs)]
        base, difference = 0.0, float(scores[0].mean() - scores[1].mean())
        if enough:
            for run in (*pair.ours, *pair.theirs):
                if (result.task, result.primary, run) not in resamples:
                    resamples[result.task, result.primary, run] = _resample(metric.aggregate, values[run], groups)
            drawn = [[resamples[result.task, result.primary, run] for run in side] for side in (pair.ours, pair.theirs)]
            tested = _test_aggregate(pair, scores, drawn, units)
    ends = [] if tested is None else [metric.shift(base, end) for end in tested.interval]
    errors = [] if tested is None else [(float(part.error), float(part.freedom)) for part in tested.parts]
    if not all(map(math.isfinite, (metric.shift(base, difference), *ends, *(error for error, _ in errors)))):
        tested = None
    too_few = f"too few {'documents' if groups is None else 'groups'}"
    comparison = Comparison(
        method=pair.method,
        reference=pair.reference,
        task=result.task,
        metric=result.primary,
        n=documents,
        clusters=clusters,
        seeds=len(pair.ours),
        difference=metric.shift(base, difference),
        test=f"none ({'values without a finite mean or variance' if enough else too_few})",
        reference_score=base if metric.aggregate is None and not metric.exponential else None,
        log_ratio=metric.exponential or None,
    )
    if tested is None:
        return comparison
    low, high = within(comparison, *ends)
    test = tested.test if groups is None else tested.test.replace("documents", "groups of documents")
    update = {"low": low, "high": high, "p": tested.p, "test": test, "errors": errors}
    return comparison.model_copy(update=update)


def _test_ratio(
    pair: Pair, method: Array, reference: Array, weights: Array, groups: Groups | None, *, of_logs: bool
) -> _Tested:
    """Test a ratio over seeds and documents, or over documents alone by McNemar's test or by permutation.

    If documents come in groups, the test is Student's t over groups, even with one seed. Both models' terms are (seeds,
    documents), the documents' weights (documents,).
    """
    answers = np.isin(np.concatenate([method, reference]), (0.0, 1.0))
    is_accuracy = bool(answers.all() and (weights == 1).all())
    estimate = over_both(method, reference, weights, groups, paired=pair.paired, shares=is_accuracy)
    if len(estimate.parts) > 1 or groups is not None:
        p, interval, test = estimate.p, estimate.interval, pair.test("paired t over documents")
    elif is_accuracy:
        p, interval = paired_accuracies(method[0], reference[0])
        test = "McNemar exact"
    else:
        p, interval = paired_permutation(mean_difference(method, reference), weights)
        test = "paired permutation" + (" of log ratios" if of_logs else "")
    if is_accuracy:
        interval = (max(interval[0], -1.0), min(interval[1], 1.0))  # no difference of accuracies is larger
    return _Tested(test, p, interval, estimate.parts)


def _resample(aggregate: Aggregation, values: Sequence[Any], groups: Groups | None) -> Array:
    """Return a run's scores on draws of its documents, or of whole groups of them, which are alike for every run."""
    units = len(values) if groups is None else count_groups(groups)
    draws: Iterable[NDArray[np.int64]] = np.random.default_rng(0).integers(0, units, size=(RESAMPLES, units))
    if groups is not None:  # the documents of the drawn groups
        members = np.split(np.argsort(groups, kind="stable"), np.cumsum(np.bincount(groups))[:-1])
        draws = (np.concatenate([members[group] for group in draw]) for draw in draws)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # a draw may lack a class
        return np.array([aggregate([values[i] for i in draw]) for draw in draws], np.float64)


def _test_aggregate(
    pair: Pair, scores: Sequence[Array], drawn: Sequence[Sequence[Array]], units: int
) -> _Tested | None:
    """Test a score that is no ratio, with a bootstrap standard error over documents; None if it has none.

    ``scores`` are those of the method and the reference by seed, ``drawn`` the same on resamples of ``units``.
    """
    differences = np.mean(drawn[0], axis=0) - np.mean(drawn[1], axis=0)
    unchanged = bool((differences == differences[0]).all())
    if not np.isfinite(differences).all() or (unchanged and differences[0] != 0):
        return None  # the draws do not show the variance of the difference
    documents = Part(float(differences.std(ddof=1)), min(units, RESAMPLES) - 1)
    seeds = over_seeds(scores[0], scores[1], paired=pair.paired)
    estimate = Estimate(float(scores[0].mean() - scores[1].mean()), (documents, *([seeds] if seeds else [])))
    test = pair.test("paired bootstrap t over documents", "bootstrap t")
    return _Tested(test, estimate.p, estimate.interval, estimate.parts)
