"""The exchange rate of two methods: how many times the parameters of one the other needs for equal gain.

Each method has gains over the base at several parameter counts n, from the same documents and seeds. Its frontier
g(x), x = log n, is Fritsch and Carlson's monotone cubic interpolation (PCHIP) of the gains after isotonic regression:
gains do not fall as n grows. With x(γ) its inverse, the exchange rate of a method over a reference is

    ρ = exp( mean over γ of  x_method(γ) - x_reference(γ) ),

the mean over the gains γ that both frontiers reach, from the larger of their lowest to the smaller of their highest. A
method of one size is a point; γ is its gain then. Nothing is extrapolated.

The 95 % interval is that of log ρ: with the standard errors over documents and over seeds, each from a bootstrap,

    log ρ ± sqrt( (t(0.975, D - 1) · error_documents)² + (t(0.975, S - 1) · error_seeds)² ),

as for all differences (:class:`hfpatch.evaluation.stats.Estimate`). Documents, or whole groups of them, are drawn
with replacement, the same ones for all methods and seeds. Seeds are drawn in the same way; their error is multiplied
by sqrt(S / (S - 1)), which corrects the bootstrap of a small sample. There is no rate, but a reason, where the
frontiers reach no common gain, in the data or in more than 5 % of the draws, or where the ends of the interval are
further apart than the smallest and the largest size of either.

A rate that is not known is censored: where a method with n parameters gains less than the reference with m, it needs
more than n/m times the reference's for that gain, and where it gains more, fewer. The bounds are the largest ratio of
a pair that gains less and the smallest of one that gains more, by paired tests over seeds and documents at the level
5 % over the number of pairs of sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are imported where they are first used

from hfpatch.evaluation.clusters import Groups, group_sums
from hfpatch.evaluation.dependence import Neighbours
from hfpatch.evaluation.metrics import Array
from hfpatch.evaluation.reading import Records
from hfpatch.evaluation.stats import FEWEST_DOCUMENTS, Estimate, Part, over_documents, over_seeds
from hfpatch.recipes.budgets import family_of
from hfpatch.recipes.pairs import is_lora
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import ALPHA
from hfpatch.results.frontier import Exchange, Frontier, FrontierLine
from hfpatch.results.parts import TaskResult

RESAMPLES = 999  # of which a standard error is known to 2 %
_MISSED = 0.05  # of the draws, without a common gain
_GRID, _LEVELS = 128, 128  # points of a curve, and levels of gain: finer ones change less than the draws' error


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
    both, units = np.concatenate([method.gains, reference.gains]), weights  # documents, or groups of them

    def unknown(why: str) -> Exchange:
        more, less = bounds(method, reference, weights, groups)
        return Exchange(why=why, more_than=more, less_than=less)

    if groups is not None:
        both = np.stack([[group_sums(one, groups) for one in seeds] for seeds in both])
        units = group_sums(weights, groups)
    (seeds, documents), sizes = both.shape[1:], len(method.parameters)
    if documents < FEWEST_DOCUMENTS:
        return Exchange(why="too few documents")
    logs = np.log(method.parameters), np.log(reference.parameters)

    def rates(gains: Array) -> tuple[Array, Array, Array]:
        """Return log ρ (draws,), NaN where there is no common gain, and the common gains' lowest and highest."""
        (x, ours), (other_x, theirs) = frontier(logs[0], gains[:, :sizes]), frontier(logs[1], gains[:, sizes:])
        lowest, highest = np.maximum(ours[:, 0], theirs[:, 0]), np.minimum(ours[:, -1], theirs[:, -1])
        areas = np.full(len(gains), np.nan)
        shares = (np.arange(_LEVELS) + 0.5) / _LEVELS
        for draw in np.flatnonzero(lowest <= highest):
            levels = lowest[draw] + (highest[draw] - lowest[draw]) * shares
            areas[draw] = np.mean(np.interp(levels, ours[draw], x) - np.interp(levels, theirs[draw], other_x))
        return areas, lowest, highest

    by_seed = both.sum(axis=2).T / units.sum()
    value, lowest, highest = (float(row[0]) for row in rates(by_seed.mean(axis=0)[None]))
    if math.isnan(value):
        return unknown("they reach no common gain")
    drawn = np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), size=RESAMPLES)
    of_documents = rates(drawn @ both.mean(axis=1).T / (drawn @ units)[:, None])[0]
    draws = [(of_documents, documents, 1.0)]
    if seeds > 1:
        if seeds**seeds <= RESAMPLES:  # all ways to draw them
            chosen = np.array(list(itertools.product(range(seeds), repeat=seeds)))
        else:
            chosen = np.random.default_rng(0).integers(0, seeds, size=(RESAMPLES, seeds))
        of_seeds = rates(by_seed[chosen].mean(axis=1))[0]
        draws.append((of_seeds, seeds, math.sqrt(seeds / (seeds - 1))))
    if any(np.isnan(drawn_rates).mean() > _MISSED for drawn_rates, _, _ in draws):
        return unknown("whether they reach a common gain is not certain")
    parts = []
    for drawn_rates, count, correction in draws:
        reached = drawn_rates[~np.isnan(drawn_rates)]
        error = float(reached.std()) if len(reached) > 1 else math.inf
        parts.append(Part(error * correction, count - 1))
    low, high = Estimate(value, tuple(parts)).interval
    if high - low > max(log[-1] - log[0] for log in logs):
        return unknown("the interval is wider than the sizes are apart")
    ends = {"rate": value, "low": low, "high": high}
    return Exchange(**{name: math.exp(log) for name, log in ends.items()}, lowest=lowest, highest=highest)


def bounds(method: Sizes, reference: Sizes, weights: Array, groups: Groups | None) -> tuple[float | None, float | None]:
    """Return what the exchange rate is more, and less, than."""
    level = ALPHA / (len(method.parameters) * len(reference.parameters))
    more, less = list[float](), list[float]()
    for size, ours in zip(method.parameters, method.gains, strict=True):
        for other, theirs in zip(reference.parameters, reference.gains, strict=True):
            difference = (ours - theirs).mean(axis=0)
            scores = (gains.sum(axis=1) / weights.sum() for gains in (ours, theirs))
            seeds = over_seeds(*scores, paired=True)
            parts = (over_documents(difference, weights, groups=groups), *([seeds] if seeds else []))
            estimate = Estimate(float(difference.sum() / weights.sum()), parts)
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
    """Return the interpolated frontiers: x (points,) and g (draws, points), from gains (draws, sizes)."""
    rising = monotone(gains)
    if len(log_parameters) < 2:
        return log_parameters, rising
    x = np.union1d(np.linspace(log_parameters[0], log_parameters[-1], _GRID), log_parameters)
    return x, scipy.interpolate.PchipInterpolator(log_parameters, rising, axis=1)(x)
