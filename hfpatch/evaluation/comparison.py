"""Paired comparisons of methods, from the per-document records that evaluations wrote."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.clusters import Groups, count_groups, group_sums
from hfpatch.evaluation.dependence import Neighbours, find_dependence, residuals
from hfpatch.evaluation.metrics import Aggregation, Array, Metric, metric_named
from hfpatch.evaluation.reading import Reader, read_metric
from hfpatch.evaluation.stats import (
    FEWEST_DOCUMENTS,
    Estimate,
    Part,
    over_documents,
    over_seeds,
    paired_accuracies,
    paired_permutation,
)
from hfpatch.results.low_noise import BITS_PER_BYTE, LOW_NOISE
from hfpatch.results.parts import Clusters, Comparison, TaskResult
from hfpatch.results.verdicts import within

RESAMPLES = 200  # of which a standard error is known to 5 %

Runs = Mapping[int, Path]


@dataclass(frozen=True)
class _Tested:
    """The result of a test, in units of the ratio, or of the score if that is no ratio."""

    test: str
    p: float
    interval: tuple[float, float]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Pairing:
    """The runs of a method and of its reference; ``paired`` if they have the same seeds in the same order."""

    method: list[Path]
    reference: list[Path]
    paired: bool = True

    def test(self, one_seed: str, kind: str = "t") -> str:
        """Return the name of the test of these runs."""
        if not self.paired:
            return f"{kind} over documents (paired) and seeds (not paired)"
        return f"paired {kind} over seeds and documents" if len(self.method) > 1 else one_seed


@dataclass(frozen=True)
class _Table:
    """Both models' terms, each (seeds, documents), the documents' weights (documents,), and their groups if any."""

    method: Array
    reference: Array
    weights: Array
    groups: Groups | None = None


@dataclass(frozen=True)
class _Measure:
    """A task's result, its primary metric, by which methods are compared, and each run's scores on resamples."""

    result: TaskResult
    metric: Metric
    resampled: dict[Path, Array] = field(default_factory=dict)


def compare(
    records: Mapping[str, Runs],
    *,
    tasks: Mapping[str, TaskResult],
    references: Mapping[str, Collection[str]],
    baseline: str = "baseline",
    aggregations: Mapping[str, Mapping[str, Aggregation]] | None = None,
    without_low_noise: Collection[str] = (),
    dependent: Mapping[str, Neighbours] | None = None,
) -> list[Comparison]:
    """Compare methods document by document, by the primary metric of each task and by its low-noise metrics.

    The baseline has no seed: its one run is paired with every seed of a method. Other runs are paired by the seeds
    that both have. If they share fewer than two, as when seeds of one diverged, all runs are used and only documents
    are paired. Corrections for several tests are left to :func:`hfpatch.results.verdicts.judge`.

    Args:
        records: for each method and seed the folder with ``<task>.jsonl`` records.
        tasks: any run's result of each task; it names the primary metric, its direction, and the low-noise metrics.
        references: for each method the methods to compare it with.
        baseline: the reference without training.
        aggregations: each task's own functions from documents to a score, by metric; by default that of its name.
        without_low_noise: tasks that are compared by their primary metric alone.
        dependent: tasks whose neighbouring documents vary together; None finds them by `find_dependent`.

    Returns:
        One comparison for each method, reference, task and metric, primary metrics first; none with a method without
        runs, and none by low-noise metrics where their values are not all finite (an answer is impossible).

    Raises:
        HfpatchError: if a record is missing or broken, or two runs were not scored on the same documents.
    """
    functions = aggregations or {}
    pairs = list(_pairs(records, references, baseline))
    if dependent is None:
        given: dict[str, Any] = {"aggregations": functions, "without_low_noise": without_low_noise}
        dependent = find_dependent(records, tasks=tasks, references=references, baseline=baseline, **given)
    primary = [_Measure(result, _metric(result, functions.get(task, {}))) for task, result in tasks.items()]
    others = []
    for name, higher in LOW_NOISE.items():
        for task, result in tasks.items():
            if name in result.metrics and name != result.primary and task not in without_low_noise:
                chosen = result.model_copy(update={"primary": name, "higher_is_better": higher})
                metric = _metric(chosen, functions.get(task, {}))
                if metric.aggregate is None:  # else a task's own of another kind
                    others.append(_Measure(chosen, metric))

    # each method with each of its references, by each measure
    comparisons, low_noise, reader = list[Comparison](), list[Comparison](), Reader()
    for method, reference, runs in pairs:
        comparisons += [_compare(method, reference, measure, runs, reader, dependent) for measure in primary]
        low_noise += [_compare(method, reference, other, runs, reader, dependent) for other in others]
    broken = {(one.method, one.reference, one.task) for one in low_noise if not math.isfinite(one.difference)}
    return comparisons + [one for one in low_noise if (one.method, one.reference, one.task) not in broken]


def _pairs(
    records: Mapping[str, Runs], references: Mapping[str, Collection[str]], baseline: str
) -> Iterator[tuple[str, str, _Pairing]]:
    """Yield each method with each of its references and their runs, as `compare` pairs them."""
    for method, reference in [(method, other) for method, others in references.items() for other in others]:
        if not (records.get(method) and records.get(reference)):
            continue
        by_seed = (records[method], records[reference])
        ours, theirs = ([runs[seed] for seed in sorted(runs)] for runs in by_seed)
        shared = sorted(set(by_seed[0]) & set(by_seed[1]))
        if reference == baseline or len(ours) == len(theirs) == 1:
            yield method, reference, _Pairing(ours, theirs)
        elif len(shared) > 1:
            ours, theirs = ([runs[seed] for seed in shared] for runs in by_seed)
            yield method, reference, _Pairing(ours, theirs)
        else:
            yield method, reference, _Pairing(ours, theirs, paired=False)


def find_dependent(
    records: Mapping[str, Runs],
    *,
    tasks: Mapping[str, TaskResult],
    references: Mapping[str, Collection[str]],
    baseline: str = "baseline",
    aggregations: Mapping[str, Mapping[str, Aggregation]] | None = None,
    without_low_noise: Collection[str] = (),
) -> dict[str, Neighbours]:
    """Return the tasks whose neighbouring documents, or declared groups of them, vary together.

    It is asked of the differences of all pairs, by bits per byte where a task has them, else by its primary metric if
    that is a mean or ratio of the documents. The arguments are those of `compare`.

    Raises:
        HfpatchError: as `compare`.
    """
    measures = []
    for task, result in tasks.items():
        if BITS_PER_BYTE in result.metrics and task not in without_low_noise:
            result = result.model_copy(update={"primary": BITS_PER_BYTE})
        metric = _metric(result, (aggregations or {}).get(task, {}))
        measures += [(result, metric)] if metric.aggregate is None else []

    # The residuals of each pair, in units of documents or of the groups that were declared
    differences: dict[str, list[Array]] = {}
    reader = Reader()
    for _, _, runs in _pairs(records, references, baseline):
        for result, metric in measures:
            values = reader.read_runs(result, metric, [*runs.method, *runs.reference])
            terms = {run: metric.ratio_terms(numbers) for run, numbers in values.items()}
            with np.errstate(over="ignore", invalid="ignore"):  # values may be infinite, or their sums
                sides = [np.mean([terms[run][0] for run in side], axis=0) for side in (runs.method, runs.reference)]
                difference, weights = sides[0] - sides[1], terms[runs.method[0]][1]
            if (groups := reader.read_groups(runs.method[0], result)) is not None:
                difference, weights = group_sums(difference, groups), group_sums(weights, groups)
            if len(difference) >= FEWEST_DOCUMENTS and np.isfinite(difference).all():
                differences.setdefault(result.task, []).append(residuals(difference[None], weights)[0])
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
        metric, name = _metric(result, functions.get(task, {})), result.primary
        reason, cause = "", None
        try:
            score = metric.overall(read_metric(folder / f"{task}.jsonl", name)[1])
            if not math.isclose(score, result.metrics[name], rel_tol=1e-6, abs_tol=1e-9):
                reason = f"they give {score:.6g}, lm-eval {result.metrics[name]:.6g}"
        except (ArithmeticError, TypeError, ValueError, AttributeError, LookupError) as error:
            reason, cause = f"{type(error).__name__}: {error}", error
        if reason:
            raise HfpatchError(
                f"task {task}: its metric {name} does not follow from the documents' recorded values, so methods "
                f"cannot be compared by it ({reason}); leave out the task or use another metric"
            ) from cause


def _metric(result: TaskResult, functions: Mapping[str, Aggregation]) -> Metric:
    name = result.primary.partition(",")[0]
    return metric_named(name, higher_is_better=result.higher_is_better, aggregation=functions.get(name))


def _compare(
    method: str,
    reference: str,
    measure: _Measure,
    runs: _Pairing,
    reader: Reader,
    dependent: Mapping[str, Neighbours],
) -> Comparison:
    """Return the comparison by one measure, not yet corrected."""
    result, metric = measure.result, measure.metric
    values = reader.read_runs(result, metric, [*runs.method, *runs.reference])
    documents = len(values[runs.method[0]])
    groups = reader.read_groups(runs.method[0], result)
    clusters = result.clusters
    if (alarm := dependent.get(result.task)) is not None:
        groups, column = alarm.runs(documents, groups), "" if clusters is None else clusters.column
        clusters = Clusters(column=column, groups=count_groups(groups), run=alarm.run, p=alarm.p)
    why = f"too few {'documents' if groups is None else 'groups'}"
    enough = (documents if groups is None else count_groups(groups)) >= FEWEST_DOCUMENTS
    if metric.aggregate is None:
        terms = {run: metric.ratio_terms(numbers) for run, numbers in values.items()}
        ours, theirs = (np.stack([terms[run][0] for run in side]) for side in (runs.method, runs.reference))
        weights = terms[runs.method[0]][1]
        with np.errstate(over="ignore", invalid="ignore"):  # values may be infinite, or their sums
            base = float((theirs.sum(axis=1) / weights.sum()).mean())
            difference = float((ours.mean(axis=0) - theirs.mean(axis=0)).sum() / weights.sum())
            finite = math.isfinite(base) and math.isfinite(difference)
            tested = _test_ratio(_Table(ours, theirs, weights, groups), metric, runs) if enough and finite else None
    else:
        scores = [np.array([metric.aggregate(values[run]) for run in side]) for side in (runs.method, runs.reference)]
        base, difference = 0.0, float(scores[0].mean() - scores[1].mean())
        tested = _test_aggregate(measure, values, runs, scores, groups) if enough else None
    ends = [] if tested is None else [metric.shift(base, end) for end in tested.interval]
    errors = [] if tested is None else [(float(part.error), float(part.freedom)) for part in tested.parts]
    if not all(map(math.isfinite, (metric.shift(base, difference), *ends, *(error for error, _ in errors)))):
        tested = None
    if enough and tested is None:
        why = "values without a finite mean or variance"
    comparison = Comparison(
        method=method,
        reference=reference,
        task=result.task,
        metric=result.primary,
        n=documents,
        clusters=clusters,
        seeds=len(runs.method),
        difference=metric.shift(base, difference),
        test=f"none ({why})",
        reference_score=base if metric.aggregate is None and not metric.exponential else None,
        log_ratio=metric.exponential or None,
    )
    if tested is None:
        return comparison
    low, high = within(comparison, *ends)
    test = tested.test if groups is None else tested.test.replace("documents", "groups of documents")
    update = {"low": low, "high": high, "p": tested.p, "test": test, "errors": errors}
    return comparison.model_copy(update=update)


def _test_ratio(table: _Table, metric: Metric, runs: _Pairing) -> _Tested:
    """Test a ratio over seeds and documents, or over documents alone by McNemar's test or by permutation.

    If documents come in groups, the test is Student's t over groups, even with one seed.
    """
    difference, weights = table.method.mean(axis=0) - table.reference.mean(axis=0), table.weights
    scores = [side.sum(axis=1) / weights.sum() for side in (table.method, table.reference)]  # of each seed
    answers = np.isin(np.concatenate([table.method, table.reference]), (0.0, 1.0))
    is_accuracy = bool(answers.all() and (weights == 1).all())
    documents = over_documents(difference, weights, shares=is_accuracy, groups=table.groups)
    seeds = over_seeds(scores[0], scores[1], paired=runs.paired)
    estimate = Estimate(float(difference.sum() / weights.sum()), (documents, *([seeds] if seeds else [])))
    if seeds is not None:
        p, interval, test = estimate.p, estimate.interval, runs.test("")
    elif table.groups is not None:
        p, interval, test = estimate.p, estimate.interval, "paired t over documents"
    elif is_accuracy:
        p, interval = paired_accuracies(table.method[0], table.reference[0])
        test = "McNemar exact"
    else:
        p, interval = paired_permutation(difference, weights)
        test = "paired permutation" + (" of log ratios" if metric.exponential else "")
    if is_accuracy:
        interval = (max(interval[0], -1.0), min(interval[1], 1.0))  # no difference of accuracies is larger
    return _Tested(test, p, interval, estimate.parts)


def _test_aggregate(
    measure: _Measure,
    values: Mapping[Path, Sequence[Any]],
    runs: _Pairing,
    scores: Sequence[Array],
    groups: Groups | None,
) -> _Tested | None:
    """Test a score that is no ratio, with a bootstrap standard error over documents; None if it has none.

    Documents, or whole groups of them, are drawn alike for every run.
    """
    aggregate, units = measure.metric.aggregate, len(values[runs.method[0]]) if groups is None else count_groups(groups)
    for run in (*runs.method, *runs.reference):
        if run in measure.resampled or aggregate is None:
            continue
        draws: Iterable[NDArray[np.int64]] = np.random.default_rng(0).integers(0, units, size=(RESAMPLES, units))
        if groups is not None:  # the documents of the drawn groups
            members = np.split(np.argsort(groups, kind="stable"), np.cumsum(np.bincount(groups))[:-1])
            draws = (np.concatenate([members[group] for group in draw]) for draw in draws)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # a draw may lack a class
            drawn = [aggregate([values[run][i] for i in draw]) for draw in draws]
        measure.resampled[run] = np.array(drawn, np.float64)
    replicates = [np.mean([measure.resampled[run] for run in side], axis=0) for side in (runs.method, runs.reference)]
    differences = replicates[0] - replicates[1]
    unchanged = bool((differences == differences[0]).all())
    if not np.isfinite(differences).all() or (unchanged and differences[0] != 0):
        return None  # the draws do not show the variance of the difference
    documents = Part(float(differences.std(ddof=1)), min(units, RESAMPLES) - 1)
    seeds = over_seeds(scores[0], scores[1], paired=runs.paired)
    estimate = Estimate(float(scores[0].mean() - scores[1].mean()), (documents, *([seeds] if seeds else [])))
    test = runs.test("paired bootstrap t over documents", "bootstrap t")
    return _Tested(test, estimate.p, estimate.interval, estimate.parts)
