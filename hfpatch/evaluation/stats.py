"""Statistics of paired differences, over documents alone or over seeds and documents.

Throughout, the difference of two models on document i with seed s is ``d[s, i]``, a document's weight is ``c[i]``, and
the quantity of interest is the ratio ``θ = mean over s of Σᵢ d[s, i] / Σᵢ c[i]`` (see `hfpatch.evaluation.metrics`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy  # its parts are imported where they are first used

from hfpatch.evaluation.clusters import Groups, unit_sums
from hfpatch.evaluation.dependence import residuals
from hfpatch.evaluation.metrics import Array
from hfpatch.results.decision import ALPHA, reach

_RESAMPLES = 9999  # so that the smallest p, 1e-4, is far below every level that decides
_BLOCK = 1 << 22  # random signs at once: 32 MiB as float64
_SMALLEST_P = 1e-15  # float64 tells no smaller ones from 0


class Part(NamedTuple):
    """A source of variation: the standard error that it causes and the degrees of freedom of that."""

    error: Any
    freedom: float


@dataclass(frozen=True)
class Estimate:
    """A difference and its sources of variation: documents, and seeds if there are several.

    The interval at level 1 - p reaches, with Student's t of each part's degrees of freedom f,

        reach(p) = sqrt(Σ over parts of (t(1 - p/2, f) · error)²)

    to both sides: the intervals of the parts, each as if the other were fixed, combined by the method of variance
    estimates recovery (Zou & Donner 2008, Statistics in Medicine 27, 1693). It is never shorter than the interval over
    documents alone or over seeds alone. With few seeds a variance of both together is not estimated well enough for
    Satterthwaite's approximation, which rejects up to 12 % of true null hypotheses at 5 %. The p-value is the p whose
    interval ends at 0, so that test and interval agree.

    Attributes:
        difference: the estimate; an array, with errors alike, gives many at once.
        parts: the sources of variation.
    """

    difference: Any
    parts: tuple[Part, ...]

    def reach(self, p: float) -> Any:
        """Return half the length of the interval at level 1 - p."""
        return reach(self.parts, p)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        reach = float(self.reach(ALPHA))
        return self.difference - reach, self.difference + reach

    @property
    def p(self) -> float:
        """The two-sided p-value of no difference, not below 1e-15."""
        size = abs(self.difference)
        if size == 0 or not all(math.isfinite(part.error) for part in self.parts):
            return 1.0
        if self.reach(1.0) >= size:  # SciPy's median of t may be a rounding error
            return 1.0
        if self.reach(_SMALLEST_P) <= size:
            return _SMALLEST_P
        root = scipy.optimize.brentq(
            lambda log_p: float(self.reach(np.exp(log_p))) - size, np.log(_SMALLEST_P), 0.0, xtol=1e-10
        )
        return float(np.exp(root))


def over_documents(differences: Array, weights: Array, *, shares: bool = False, groups: Groups | None = None) -> Part:
    """Return the part of documents in ``Σ d / Σ c``, both (documents,), where seeds are averaged in ``d``.

    Over G groups, with the sums ``a_g`` and ``c_g`` and ``θ = Σ a / Σ c``, the error is that of the jackknife, which
    leaves out one group at a time; a document without declared groups is a group by itself:

        sqrt((G - 1)/G · Σ_g (θ₋g - θ)²),    θ₋g - θ = -(a_g - θ c_g) / (Σ c - c_g)

    the cluster-robust error CR3 of a weighted mean (MacKinnon, Nielsen & Webb 2023, J. Econometrics 232, 272), for
    Student's t with G - 1 degrees of freedom. For groups of one size it is the usual cluster-robust error with the
    factor G/(G - 1), of documents of one weight the standard deviation over √G; where a few have most of the weight it
    is larger, and tests with it keep their level better; where one has all, it is infinite.

    Args:
        differences: ``d``.
        weights: ``c``.
        shares: differences are between -1 and 1, as for right and wrong answers. Then one document gained and one
            lost are added (Bonett & Price 2012, J. Educ. Behav. Stat. 37, 479), without which a few documents that all
            agree would have no variation. Of groups, one gained and one lost are added, as large as the root mean
            square of the changed groups' sums.
        groups: of the documents, if they come in groups.
    """
    differences, weights = unit_sums(differences, groups), unit_sums(weights, groups)
    if shares:
        changed = differences[differences != 0]
        size = max(1.0, float(np.sqrt((changed**2).mean()))) if len(changed) else 1.0
        differences, weights = np.append(differences, [size, -size]), np.append(weights, [size, size])
    rest = weights.sum() - weights
    if not rest.all():  # without the one that has all weight there is no ratio
        return Part(math.inf, len(rest) - 1)
    return jackknife(residuals(differences, weights) / rest)


def jackknife(left_out: Array) -> Part:
    """Return the part of n units from what leaving out each of them changes, (n,): ``sqrt((n - 1)/n · Σ change²)``."""
    count = len(left_out)
    return Part(float(np.sqrt((count - 1) / count * (left_out**2).sum())), count - 1)


def over_seeds(method: Array, reference: Array, *, paired: bool) -> Part | None:
    """Return the part of seeds in the difference of two mean scores, or None where neither has two seeds.

    Args:
        method: each seed's score, (seeds,).
        reference: the same of the reference.
        paired: ``reference`` has the method's seeds in their order, or is one score without a seed. Otherwise both
            have the same variance over seeds, which is pooled.
    """
    groups = [method - reference] if paired else [method, reference]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom == 0:
        return None
    variance = sum(((group - group.mean()) ** 2).sum() for group in groups) / freedom
    return Part(float(np.sqrt(variance * math.fsum(1 / len(group) for group in groups))), freedom)


def over_both(
    method: Array, reference: Array, weights: Array, groups: Groups | None, *, paired: bool = True, shares: bool = False
) -> Estimate:
    """Return the difference of two models over documents and, if several, over seeds, from terms (seeds, documents).

    Other arguments are those of `over_documents` and `over_seeds`.
    """
    difference = mean_difference(method, reference)
    seeds = over_seeds(*(side.sum(axis=1) / weights.sum() for side in (method, reference)), paired=paired)
    documents = over_documents(difference, weights, shares=shares, groups=groups)
    return Estimate(float(difference.sum() / weights.sum()), (documents, *([seeds] if seeds else [])))


def mean_difference(method: Array, reference: Array) -> Array:
    """Return the mean over seeds of each document's difference, (documents,), from both (seeds, documents).

    It is exactly 0 where all runs agree, of which a difference of means would be a rounding error with a p-value.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # values may be infinite, or their sums
        if len(reference) in (1, len(method)):
            return np.asarray((method - reference).mean(axis=0))
        return np.asarray(method.mean(axis=0) - reference.mean(axis=0))


def paired_accuracies(method: Array, reference: Array) -> tuple[float, tuple[float, float]]:
    """Return the exact McNemar p-value of two models' right (1) and wrong (0) answers, and the difference's interval.

    The interval is Student's with one document gained and one lost added (see `over_documents`), within -1 and 1. Where
    McNemar's test is not significant and this interval narrowly excludes 0, it is extended to 0. Answers are
    (documents,).
    """
    difference = method - reference
    gained, lost = int(np.sum(difference == 1)), int(np.sum(difference == -1))
    p = float(scipy.stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    part = over_documents(difference, np.ones_like(difference), shares=True)
    low, high = Estimate(float(difference.mean()), (part,)).interval
    if p >= ALPHA:
        low, high = min(low, 0.0), max(high, 0.0)
    return p, (max(low, -1.0), min(high, 1.0))


def paired_permutation(differences: Array, weights: Array, *, seed: int = 0) -> tuple[float, tuple[float, float]]:
    """Return the p-value of no difference under random exchange of the two models on each document, and its interval.

    Exchanging the models on a random half of the documents puts ``θ`` between the ratios of the two halves or outside
    them. The p-value of ``θ`` is the share of random halves between whose ratios it lies, and the 95 % interval has
    every ``θ`` with a p-value of 5 % or more (Hartigan 1969, JASA 64, 1303), so that test and interval agree. Where a
    half has no weight, every ``θ`` lies between: nothing that weighs was exchanged, or everything. Differences ``d``
    and weights ``c`` are (documents,).
    """
    rng, terms = np.random.default_rng(seed), np.stack([differences, weights], axis=1)
    halves = np.empty((_RESAMPLES, 2))  # the sums of both over random subsets
    step = max(1, _BLOCK // len(terms))
    for start in range(0, _RESAMPLES, step):
        chosen = rng.integers(0, 2, size=(min(step, _RESAMPLES - start), len(terms)), dtype=np.int8)
        halves[start : start + step] = chosen.astype(np.float64) @ terms
    sums, of_weights = np.stack([halves, terms.sum(axis=0) - halves]).transpose(2, 0, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sums / of_weights
    ratios[np.abs(ratios) <= 1e-12 * np.abs(differences).sum() / weights.sum()] = 0.0
    is_empty = (of_weights <= 1e-12 * weights.sum()).any(axis=0)
    lowest, highest = np.where(is_empty, [[-np.inf], [np.inf]], [ratios.min(axis=0), ratios.max(axis=0)])
    p = (1 + np.sum((lowest <= 0) & (highest >= 0))) / (_RESAMPLES + 1)
    rank = round(ALPHA * (_RESAMPLES + 1)) - 1
    return float(p), (float(np.sort(lowest)[rank - 1]), float(np.sort(highest)[-rank]))
