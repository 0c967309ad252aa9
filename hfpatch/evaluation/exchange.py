"""The exchange rate of two methods: how many times the parameters of one the other needs for equal gain.

Each method has gains over the base at several parameter counts n, from the same documents and seeds. Its frontier
g(x), x = log n, is Fritsch and Carlson's monotone cubic interpolation (PCHIP) of the gains after isotonic regression:
gains do not fall as n grows. With x(γ) its inverse, the least x with the gain γ, the exchange rate of a method over a
reference is

    ρ = exp( mean over γ of  x_method(γ) - x_reference(γ) ),

the mean over the gains γ that both frontiers reach, from the larger of their lowest to the smaller of their highest. A
method of one size is a point; γ is its gain then. Nothing is extrapolated.

The 95 % interval is that of log ρ,

    log ρ ± sqrt( (t(0.975, D - 1) · error_documents)² + (t(0.975, S - 1) · error_seeds)² ),

as for all differences (:class:`hfpatch.evaluation.stats.Estimate`), with the errors of the jackknife: one document (or
group of them), or one seed, is left out at a time, of all methods (:func:`hfpatch.evaluation.stats.jackknife`). There
is no rate, but a reason, where the frontiers reach no common gain; where the overlap of their gains,

    min(highest_method - lowest_reference, highest_reference - lowest_method),

is not above 0 by a one-sided test at 5 % with its errors, or gone without one document or seed; or where the ends of
the interval are further apart than the smallest and the largest size of either.

A rate that is not known is censored: where a method with n parameters gains less than the reference with m, it needs
more than n/m times the reference's for that gain, and where it gains more, fewer. The bounds are the largest ratio of
a pair that gains less and the smallest of one that gains more, by paired tests over seeds and documents at the level
5 % over the number of pairs of sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are imported where they are first used

from hfpatch.evaluation.clusters import Groups, unit_sums
from hfpatch.evaluation.dependence import Neighbours
from hfpatch.evaluation.metrics import Array
from hfpatch.evaluation.reading import Records
from hfpatch.evaluation.stats import Estimate, jackknife, over_both
from hfpatch.recipes.budgets import family_of
from hfpatch.recipes.pairs import is_lora
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import ALPHA, FEWEST_DOCUMENTS
from hfpatch.results.frontier import Exchange, Frontier, FrontierLine
from hfpatch.results.parts import TaskResult

_GRID, _LEVELS = 128, 128  # points of a curve, and levels of gain: finer ones change a rate by less than 0.1 %


@dataclass(frozen=True)
class Sizes:
    """A method at several sizes.

    Attributes:
        parameters: trainable parameters, ascending, (sizes,).
        gains: of each document over the base, above 0 is better, (sizes, seeds, documents).
    """

    parameters: Array
    gains: Array


def exchange_rate(method: Sizes, reference: Sizes, weights: Array, groups: Groups | None = None) -> Exchange:
    """Return the exchange rate of a method over a reference, or why there is none and its bounds.

    Args:
        method: with the seeds and documents of the reference, in the same order.
        reference: at two sizes at least.
        weights: of the documents, (documents,); the gain at a size is ``Σ gains / Σ weights``.
        groups: of the documents, if they come in groups.
    """

    def unknown(why: str) -> Exchange:
        more, less = bounds(method, reference, weights, groups)
        return Exchange(why=why, more_than=more, less_than=less)

    both, units = (unit_sums(one, groups) for one in (np.concatenate([method.gains, reference.gains]), weights))
    (seeds, documents), sizes = both.shape[1:], len(method.parameters)
    if documents < FEWEST_DOCUMENTS:
        return Exchange(why="too few documents")
    logs = np.log(method.parameters), np.log(reference.parameters)

    def measure(gains: Array) -> tuple[Array, Array, Array, Array]:
        """Return log ρ, NaN without a common gain, the overlap, and the common gains' ends, of gains (rows, sizes)."""
        (x, ours), (other_x, theirs) = frontier(logs[0], gains[:, :sizes]), frontier(logs[1], gains[:, sizes:])
        lowest, highest = np.maximum(ours[:, 0], theirs[:, 0]), np.minimum(ours[:, -1], theirs[:, -1])
        areas = np.full(len(gains), np.nan)
        shares = (np.arange(_LEVELS) + 0.5) / _LEVELS
        for row in np.flatnonzero(lowest <= highest):
            levels = lowest[row] + (highest[row] - lowest[row]) * shares
            areas[row] = np.mean(_least(x, ours[row], levels) - _least(other_x, theirs[row], levels))
        return areas, np.minimum(ours[:, -1] - theirs[:, 0], theirs[:, -1] - ours[:, 0]), lowest, highest

    by_seed, by_document = both.sum(axis=2).T / units.sum(), both.mean(axis=1).T
    value, overlap, lowest, highest = (float(row[0]) for row in measure(by_seed.mean(axis=0)[None]))
    if math.isnan(value):
        return unknown("they reach no common gain")
    left_out = [measure((by_document.sum(axis=0) - by_document) / (units.sum() - units)[:, None])]
    if seeds > 1:
        left_out.append(measure((by_seed.sum(axis=0) - by_seed) / (seeds - 1)))
    overlaps = Estimate(overlap, tuple(jackknife(without - overlap) for _, without, *_ in left_out))
    if overlaps.reach(2 * ALPHA) > overlap or any(np.isnan(without).any() for without, *_ in left_out):
        return unknown("whether they reach a common gain is not certain")
    low, high = Estimate(value, tuple(jackknife(without - value) for without, *_ in left_out)).interval
    if high - low > max(log[-1] - log[0] for log in logs):
        return unknown("the interval is wider than the sizes are apart")
    rate, low, high = map(math.exp, (value, low, high))
    return Exchange(rate=rate, low=low, high=high, lowest=lowest, highest=highest)


def _least(x: Array, gains: Array, levels: Array) -> Array:
    """Return the least x at which a rising curve has each level; `numpy.interp` returns the largest."""
    return np.interp(-levels, -gains[::-1], x[::-1])


def bounds(method: Sizes, reference: Sizes, weights: Array, groups: Groups | None) -> tuple[float | None, float | None]:
    """Return what the exchange rate is more, and less, than."""
    level = ALPHA / (len(method.parameters) * len(reference.parameters))
    more, less = list[float](), list[float]()
    for size, ours in zip(method.parameters, method.gains, strict=True):
        for other, theirs in zip(reference.parameters, reference.gains, strict=True):
            estimate = over_both(ours, theirs, weights, groups)
            if abs(estimate.difference) > estimate.reach(level):
                (more if estimate.difference < 0 else less).append(float(size / other))
    return max(more, default=None), min(less, default=None)


def exchange_rates(
    records: Records,
    methods: Mapping[str, Mapping[str, int]],
    reference: str,
    result: TaskResult,
    neighbours: Neighbours | None = None,
) -> dict[str, Exchange]:
    """Return the exchange rate of each method over a reference, or why there is none, from the runs' records.

    It uses the seeds with which every size of the method and of the reference was trained.

    Args:
        records: the records of all runs.
        methods: by method its names in ``records``, with the parameters of each.
        reference: one of the methods.
        result: any run's result on the task; ``primary`` is the measure.
        neighbours: the units of the task, where neighbouring documents vary together.
    """
    metric, others = records.metric(result), [name for name in methods if name != reference]
    if metric.aggregate is not None:
        return {name: Exchange(why=f"{result.primary} is no mean of documents") for name in others}
    rates, (base,) = dict[str, Exchange](), records.runs[records.baseline].values()
    for name in others:
        families = (methods[name], methods[reference])
        sizes = [sorted((size, one) for one, size in family.items() if one in records.runs) for family in families]
        seeds_of = [set(records.runs[one]) for side in sizes for _, one in side] if all(sizes) else [set()]
        seeds = sorted(set.intersection(*seeds_of))
        if not seeds or any(len(dict(side)) < len(side) for side in sizes):
            rates[name] = Exchange(why="two of its budgets are one size" if seeds else "the two share no seed")
            continue
        runs = [[[records.runs[one][seed] for seed in seeds] for _, one in side] for side in sizes]
        read = records.read_runs(result, [base, *(path for side in runs for one in side for path in one)])
        terms = {path: metric.ratio_terms(values) for path, values in read.items()}
        sign = 1.0 if result.higher_is_better else -1.0
        ours, theirs = (
            Sizes(
                np.array([size for size, _ in side], dtype=np.float64),
                sign * np.array([[terms[path][0] - terms[base][0] for path in one] for one in paths]),
            )
            for side, paths in zip(sizes, runs, strict=True)
        )
        if not (np.isfinite(ours.gains).all() and np.isfinite(theirs.gains).all()):
            rates[name] = Exchange(why="not all values are finite")
            continue
        weights, groups = terms[base][1], records.read_groups(base, result)
        if neighbours is not None:
            groups = neighbours.runs(len(weights), groups)
        rates[name] = exchange_rate(ours, theirs, weights, groups)
    return rates


def frontier_of(results: ComparisonResults, records: Records) -> Frontier | None:
    """Return the frontier of complete results, by the measure that decides the first task; None without budgets.

    The reference is the LoRA called ``lora``, or the first one, that has several budgets.
    """
    families: dict[str, dict[str, int]] = {}
    for name in results.others:
        families.setdefault(family_of(name), {})[name] = results.methods[name].trainable
    task = results.first_task
    if task is None or all(name in sizes for name, sizes in families.items()):
        return None
    loras = [f for f, sizes in families.items() if len(sizes) > 1 and is_lora(results.methods[next(iter(sizes))].parts)]
    reference = "lora" if "lora" in loras else next(iter(loras), None)
    measure, rates = results.deciding[task], dict[str, Exchange]()
    if reference is not None and results.baseline is not None:
        result = results.scores_of(results.methods[results.baseline].runs[0])[task]
        chosen = result.model_copy(update={"primary": measure.metric, "higher_is_better": measure.higher_is_better})
        units = next((one.clusters for one in results.comparisons if one.task == task), None)
        in_runs = None if units is None or units.run is None else Neighbours(units.run, units.p or 0.0)
        rates = exchange_rates(records, families, reference, chosen, in_runs)
    lines = [
        FrontierLine(method=name, points=sorted(sizes, key=lambda name: sizes[name]), exchange=rates.get(name))
        for name, sizes in families.items()
    ]
    return Frontier(task=task, metric=measure.metric, reference=reference, lines=lines)


def monotone(gains: Array) -> Array:
    """Return the isotonic regression of gains (..., sizes) along their last axis, by its min-max formula."""
    sizes = gains.shape[-1]
    sums = np.concatenate([np.zeros((*gains.shape[:-1], 1)), np.cumsum(gains, axis=-1)], axis=-1)
    averages = []
    for k in range(sizes):
        means = [[(sums[..., j + 1] - sums[..., i]) / (j + 1 - i) for j in range(k, sizes)] for i in range(k + 1)]
        averages.append(np.max([np.min(column, axis=0) for column in means], axis=0))
    return np.stack(averages, axis=-1)


def frontier(log_parameters: Array, gains: Array) -> tuple[Array, Array]:
    """Return the interpolated frontiers: x (points,) and g (rows, points), from gains (rows, sizes)."""
    rising = monotone(gains)
    if len(log_parameters) < 2:
        return log_parameters, rising
    x = np.union1d(np.linspace(log_parameters[0], log_parameters[-1], _GRID), log_parameters)
    return x, scipy.interpolate.PchipInterpolator(log_parameters, rising, axis=1)(x)
