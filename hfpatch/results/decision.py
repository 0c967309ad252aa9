"""How a primary difference is decided, and with what probability: pure functions of errors, levels and margins.

A difference ``d`` (above 0 is better) has one or two sources of variation, documents and seeds, each with a standard
error ``e`` and degrees of freedom ``f``. At level a its interval reaches to both sides

    reach(a) = sqrt(Σ over sources of (t(1 - a/2, f) · e)²)

(Zou & Donner 2008, Statistics in Medicine 27, 1693; see :class:`hfpatch.evaluation.stats.Estimate`). With the margin δ,
the largest difference that does not matter, and the level a of one pair:

    gain    better, worse        |d| > reach(a)
            equivalent           |d| + reach(2a) < δ       two one-sided tests (Schuirmann 1987, J. Pharmacokinet.
            undecided            neither                   Biopharm. 15, 657)
    keep    kept                 d - reach(2a) > -δ        one-sided, as a method may be better than the base
            lost                 d + reach(2a) < 0
            undecided            neither

Where both hold the outcome is better, worse or lost *by less than the margin*. Each of a question's m pairs has
``a = α/m`` (Bonferroni), or its part of that at a look (:mod:`hfpatch.results.verdicts`).

**Power.** Of a design with S seeds the true error over seeds is σ₁/√S with the estimate ``e₁²·u``, u ~ χ²(f)/f and
f = S - 1. Where σ₁ itself was estimated with f₀ degrees of freedom, the truth is that estimate over √w, w ~ χ²(f₀)/f₀.
The probability of a decision is the mean over u and w of that of the normal ``d`` with the variance ``e₁² + e₂²``. Both
distributions are replaced by equally probable points.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hfpatch.recipes.questions import PrimaryName

ALPHA = 0.05
"""The level of a question: the probability that any of its claims is false."""
POWER = 0.80
"""The probability with which a design should decide."""
FEWEST_DOCUMENTS = 20
"""With fewer documents, or groups of them, no difference is tested: below this the intervals have no known coverage."""
MOST_DOCUMENTS = 10**7
_POINTS = 24
_DOUBLINGS = 60

Array = NDArray[np.float64]
Decided = Literal[
    "better",
    "worse",
    "equivalent",
    "better by less than the margin",
    "worse by less than the margin",
    "kept",
    "lost",
    "lost by less than the margin",
    "undecided",
]


def reach(parts: Iterable[tuple[Any, float]], p: float) -> Any:
    """Return half the length of the interval at level 1 - p: ``sqrt(Σ (t(1 - p/2, f) · error)²)``.

    Args:
        parts: the standard error (or an array of many) and the degrees of freedom f of each source of variation.
        p: one minus the level.
    """
    from scipy.special import stdtrit

    return sum((stdtrit(freedom, p / 2) * error) ** 2 for error, freedom in parts) ** 0.5


def decide_gain(sign: tuple[float, float], margin_test: tuple[float, float], margin: float) -> Decided:
    """Return the outcome of a pair of ``gain``.

    Args:
        sign: the interval at the level a; above 0 is better.
        margin_test: the interval at the level 2a.
        margin: δ, 0 where there is none.
    """
    equivalent = -margin < margin_test[0] and margin_test[1] < margin
    if sign[0] > 0:
        return "better by less than the margin" if equivalent else "better"
    if sign[1] < 0:
        return "worse by less than the margin" if equivalent else "worse"
    return "equivalent" if equivalent else "undecided"


def decide_keep(margin_test: tuple[float, float], margin: float) -> Decided:
    """Return the outcome of a method of ``keep``, from the interval of its change at the level 2a."""
    kept = margin_test[0] > -margin
    if margin_test[1] < 0:
        return "lost by less than the margin" if kept else "lost"
    return "kept" if kept else "undecided"


def rate_error(losses: Mapping[float, float], best: float, cap: float = math.inf) -> float:
    """Return what the choice of a learning rate may be worth: a quarter of the larger excess loss of its neighbours.

    With rates a factor of 3 apart a better rate lies between two that were tried. In 95 % of 82 subgrids of committed
    trials with a factor of 9, the rates left out gained at most this much.

    Args:
        losses: by rate, nats per token on tuning's text; infinite where the trial diverged.
        best: the chosen rate.
        cap: the untrained base's loss, above which a loss says nothing of how curved the losses are; no limit for a
            method whose best loss is above it.

    Returns:
        The error in nats per token; infinite where the best rate is at an edge, so that nothing bounds it.
    """
    rates = sorted(losses)
    index = rates.index(best)
    if index in (0, len(rates) - 1):
        return math.inf
    worst = max(losses[rates[index - 1]], losses[rates[index + 1]])
    return ((min(worst, cap) if cap > losses[best] else worst) - losses[best]) / 4


@dataclass(frozen=True)
class Design:
    """What is known of the errors of one difference in a design of some seeds and documents.

    Attributes:
        of_documents: the standard error over documents, and its degrees of freedom.
        of_seeds: the same over seeds; None where seeds play no part.
        estimate_freedom: the degrees of freedom f₀ of the estimate that ``of_seeds`` comes from; infinite of the truth.
    """

    of_documents: tuple[float, float]
    of_seeds: tuple[float, float] | None = None
    estimate_freedom: float = math.inf

    @classmethod
    def of(cls, errors: Iterable[tuple[float, float]]) -> Design:
        """Return the design of a difference as it was measured."""
        documents, *seeds = errors
        return cls(documents, seeds[0], estimate_freedom=seeds[0][1]) if seeds else cls(documents)

    def with_seeds(self, seeds: int) -> Design:
        """Return the same with so many paired seeds."""
        if self.of_seeds is None:
            return self
        error, freedom = self.of_seeds
        return replace(self, of_seeds=(error * math.sqrt((freedom + 1) / seeds), seeds - 1))

    def with_documents(self, documents: int) -> Design:
        """Return the same with so many documents, or groups.

        The error over seeds has a part of documents, which is not known: with more of them it stays, with fewer it
        grows as if it were all theirs.
        """
        error, freedom = self.of_documents
        times = math.sqrt((freedom + 1) / documents)
        of_seeds = self.of_seeds
        if of_seeds is not None and times > 1:
            of_seeds = of_seeds[0] * times, of_seeds[1]
        return replace(self, of_documents=(error * times, documents - 1), of_seeds=of_seeds)

    def decides(self, name: PrimaryName, effect: float, level: float, margin: float = 0.0) -> float:
        """Return the probability that a true difference is decided.

        Args:
            name: the question.
            effect: the true difference, above 0 is better.
            level: a, of this pair.
            margin: δ, 0 where there is none.
        """
        from scipy.special import ndtr

        error, wide, narrow = self._points(level)

        def below(end: Array) -> Array:
            """Return the probability of a difference below ``end``."""
            probability: Array = ndtr((end - effect) / error)
            return probability

        if name == "keep":
            undecided = np.maximum(0.0, below(narrow - margin) - below(-narrow))
        else:
            inner = np.maximum(0.0, margin - narrow)  # nearer to 0 is equivalent
            outer = np.maximum(wide, inner)
            undecided = below(outer) - below(inner) + below(-inner) - below(-outer)
        return float(1 - np.mean(undecided))

    def smallest_difference(self, level: float, name: PrimaryName = "gain") -> float:
        """Return the true difference, of ``keep`` the true loss, that is found in 80 % of cases."""
        from scipy.special import ndtr, ndtri

        if name == "keep":  # a loss is as far below 0 as 0 is above the margin
            return self.smallest_margin(level, name)
        error, wide, _ = self._points(level)
        if self.of_seeds is None:  # the far side is never found
            return float(wide[0] + error[0] * ndtri(POWER))

        def excess(size: float) -> float:
            return float(np.mean(ndtr((size - wide) / error) + ndtr((-size - wide) / error))) - POWER

        return self._solve(excess)

    def smallest_margin(self, level: float, name: PrimaryName = "gain") -> float:
        """Return the margin within which equal methods are found to be equivalent, or kept, in 80 % of cases."""
        from scipy.special import ndtr, ndtri

        error, _, narrow = self._points(level)
        sides = 1 if name == "keep" else 2
        if self.of_seeds is None:
            return float(narrow[0] + error[0] * ndtri(1 - (1 - POWER) / sides))

        def excess(margin: float) -> float:
            return float(np.mean(np.maximum(0.0, 1 - sides * ndtr((narrow - margin) / error)))) - POWER

        return self._solve(excess)

    def _points(self, level: float) -> tuple[Array, Array, Array]:
        """Return at equally probable points the error of the difference, reach(level) and reach(2·level)."""
        error, freedom = self.of_documents
        if self.of_seeds is None:
            parts: list[tuple[Any, float]] = [(np.array([error]), freedom)]
            total = np.array([error])
        else:
            of_seeds, of_freedom = self.of_seeds
            true = of_seeds / np.sqrt(_chi_square(self.estimate_freedom)[:, None])  # each possible truth is a row
            parts = [(error, freedom), (true * np.sqrt(_chi_square(of_freedom)[None, :]), of_freedom)]
            total = np.sqrt(true**2 + error**2)
        tiny = np.finfo(np.float64).tiny
        return np.maximum(total, tiny), reach(parts, level), reach(parts, min(1.0, 2 * level))

    def _solve(self, excess: Callable[[float], float]) -> float:
        from scipy.optimize import brentq

        scale = self.of_documents[0] + (self.of_seeds[0] if self.of_seeds is not None else 0.0)
        if scale == 0 or excess(0.0) >= 0:  # of errors whose squares are 0, too
            return 0.0
        high = scale
        for _ in range(_DOUBLINGS):
            if excess(high) >= 0:
                return float(brentq(excess, 0.0, high, xtol=1e-4 * high))
            high *= 2
        return math.inf


def fewest(
    design: Callable[[int], Design], pair: tuple[PrimaryName, float, float, float], *, above: int, most: int
) -> int | None:
    """Return the fewest seeds, documents or groups that decide a true difference in 80 % of cases, or None.

    Args:
        design: returns the design of so many.
        pair: the question, the true difference, the level and the margin, as :meth:`Design.decides` takes them.
        above: a number that is too small.
        most: the largest number.
    """

    def enough(number: int) -> bool:
        return design(number).decides(*pair) >= POWER

    return bisect_left(range(most), True, above + 1, key=enough) if enough(most) else None


def _chi_square(freedom: float) -> Array:
    """Return equally probable points of a chi-square with ``freedom`` degrees of freedom over these."""
    from scipy.special import gammaincinv

    if math.isinf(freedom):
        return np.ones(1)
    points: Array = gammaincinv(freedom / 2, (np.arange(_POINTS) + 0.5) / _POINTS) * 2 / freedom
    return points
