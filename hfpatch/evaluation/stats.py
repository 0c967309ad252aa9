"""Statistics of paired differences, over documents alone or over seeds and documents.

Throughout, the difference of two models on document i with seed s is ``d[s, i]``, a document's weight is ``c[i]``, and
the quantity of interest is the ratio ``θ = mean over s of Σᵢ d[s, i] / Σᵢ c[i]`` (see `hfpatch.evaluation.metrics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest
from scipy.stats import t as student

from hfpatch.evaluation.metrics import Array, ratio_error

LEVEL = 0.95
POWER = 0.80
_RESAMPLES = 9999
_FEW_VALUES = 32
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Estimate:
    """A difference, its standard error and the degrees of freedom of that."""

    difference: float
    error: float
    freedom: float


def bootstrap_interval(differences: Array, weights: Array, *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of ``Σ d / Σ c`` over documents, both (documents,).

    Documents with equal values are resampled together by one multinomial draw, which is the same distribution.
    """
    rng = np.random.default_rng(seed)
    pairs, counts = np.unique(np.stack([differences, weights]), axis=1, return_counts=True)
    if len(counts) <= _FEW_VALUES:
        drawn = rng.multinomial(len(differences), counts / counts.sum(), size=_RESAMPLES)
        replicates = (drawn @ pairs[0]) / (drawn @ pairs[1])
    else:
        replicates = _resampled_ratios(differences, weights, rng)
    low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _resampled_ratios(differences: Array, weights: Array, rng: np.random.Generator) -> Array:
    documents = len(differences)
    replicates = np.empty(_RESAMPLES)
    step = max(1, _BLOCK // documents)
    for start in range(0, _RESAMPLES, step):
        rows = rng.integers(0, documents, size=(min(step, _RESAMPLES - start), documents))
        replicates[start : start + step] = differences[rows].sum(axis=1) / weights[rows].sum(axis=1)
    return replicates


def mcnemar_p(method: Array, reference: Array) -> float:
    """Return the exact McNemar p-value of two models' right (1) and wrong (0) answers, each (documents,)."""
    gained = int(np.sum((method == 1) & (reference == 0)))
    lost = int(np.sum((method == 0) & (reference == 1)))
    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def permutation_p(differences: Array, *, seed: int = 0) -> float:
    """Return the two-sided p-value of a sum of 0 under random exchange of the two models on each document.

    Args:
        differences: ``d``, (documents,).
        seed: of the permutations; where all of them are fewer than the random ones, all are taken.
    """
    moving = differences[differences != 0]
    count = len(moving)
    bound = abs(float(moving.sum())) - 1e-12 * float(np.abs(moving).sum())
    if 2**count <= _RESAMPLES:
        signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
        return float(np.mean(np.abs(signs @ moving) >= bound))
    rng = np.random.default_rng(seed)
    step = max(1, _BLOCK // count)
    extreme = 0
    for start in range(0, _RESAMPLES, step):
        flipped = rng.integers(0, 2, size=(min(step, _RESAMPLES - start), count), dtype=np.int8)
        sums = moving.sum() - 2 * (flipped.astype(np.float64) @ moving)
        extreme += int(np.sum(np.abs(sums) >= bound))
    return (extreme + 1) / (_RESAMPLES + 1)


def over_documents(differences: Array, weights: Array) -> Estimate:
    """Return the estimate from one seed: documents are the sample, both arguments (documents,)."""
    estimate = float(differences.sum() / weights.sum())
    return Estimate(estimate, ratio_error(differences, weights), len(differences) - 1)


def over_seeds_and_documents(differences: Array, weights: Array) -> Estimate:
    """Return the estimate with seeds and documents both as random effects.

    With u[s, i] the difference as a per-document value whose mean over documents is seed s's ratio, the mean squares of
    the two-way table without replication give

        Var(θ) = (MS_seed + MS_document - MS_residual) / (S N),

    with Satterthwaite's degrees of freedom (the quasi-F of Clark, 1973). The variance is not let below what documents
    alone or the residual alone give, as the difference of mean squares can by chance. Resampling two or three seeds
    would give intervals that are too narrow: a bootstrap never sees more spread than its few seeds have.

    Args:
        differences: ``d``, (seeds, documents), at least two of each.
        weights: ``c``, (documents,).
    """
    seeds, documents = differences.shape
    ratios = differences.sum(axis=1, keepdims=True) / weights.sum()
    values = ratios + differences * documents / weights.sum() - ratios * weights / weights.mean()
    mean = values.mean()
    by_seed, by_document = values.mean(axis=1) - mean, values.mean(axis=0) - mean
    residual = values - mean - by_seed[:, None] - by_document[None, :]
    freedoms = np.array([seeds - 1, documents - 1, (seeds - 1) * (documents - 1)])
    sums = np.array([documents * (by_seed**2).sum(), seeds * (by_document**2).sum(), (residual**2).sum()])
    squares = sums / freedoms
    combined = squares[0] + squares[1] - squares[2]
    variance = max(combined, squares[1], squares[2])
    spread = ((squares**2) / freedoms).sum()
    freedom = variance**2 / spread if spread > 0 else float(documents - 1)
    return Estimate(float(mean), float(np.sqrt(variance / (seeds * documents))), float(freedom))


def student_interval(estimate: Estimate) -> tuple[float, float]:
    """Return the 95 % interval of an estimate from Student's t."""
    reach = float(student.ppf((1 + LEVEL) / 2, estimate.freedom)) * estimate.error
    return estimate.difference - reach, estimate.difference + reach


def student_p(estimate: Estimate) -> float:
    """Return the two-sided p-value of no difference from Student's t."""
    if estimate.error == 0:
        return 1.0 if estimate.difference == 0 else 0.0
    return float(2 * student.sf(abs(estimate.difference) / estimate.error, estimate.freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method: the k-th smallest of m times ``m + 1 - k``."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def smallest_visible(estimate: Estimate) -> float:
    """Return the true difference that a two-sided test at 5 % would find four times out of five.

    It is ``(t₀.₉₇₅ + t₀.₈) · error`` with the estimate's degrees of freedom, before any correction over tasks.
    """
    quantiles = student.ppf([(1 + LEVEL) / 2, POWER], estimate.freedom)
    return float(quantiles.sum() * estimate.error)
