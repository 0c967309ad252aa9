"""The power of a comparison before it is run, by the tests that `compare` uses.

In the model, the difference of a method and its reference on document i with seed s is

    d[s, i] = θ + u[i] + v[s, i] + w[s]        Var(u) = σ²·κ,  Var(v) = σ²·(1 - κ),  Var(w) = τ²

θ is the true difference, σ the standard deviation of a document's difference in one run, κ the share of its variance
that all seeds have in common, and τ the shift of all documents by a seed. With n documents and S seeds the mean has the
variance ``(σ²κ + σ²(1 - κ)/S)/n + τ²/S``. Tests estimate its parts as `hfpatch.evaluation.stats` does: over documents
``e₂² = σ²(κ + (1 - κ)/S)/n``, over seeds ``e₁² = (σ²(1 - κ)/n + τ²)/S`` times a chi-square with S - 1 degrees of
freedom over S - 1, and find a difference where it is larger than their reach.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, chi2, norm

from hfpatch.evaluation.stats import Estimate, Part
from hfpatch.recipes.strict import MOST_SEEDS
from hfpatch.results.decision import ALPHA, FEWEST_DOCUMENTS, POWER, Design

MOST_DOCUMENTS = 10**8  # beyond these, "no number" is the more useful answer
_POINTS = 400  # of the distribution of the estimated variance over seeds


@dataclass(frozen=True)
class Assumed:
    """How much a method's documents differ from its reference's, relative to how much the reference's vary.

    σ² is 2·(1 - ``correlation``) times the variance of the reference's scores, the correlation that of a document's
    scores under both; ``shared`` is κ, and ``shift`` τ over σ.
    """

    correlation: float
    shared: float
    shift: float

    def text(self, reference: str) -> str:
        """Return what is assumed as a predicate: ``correlates 0.8 with the base, seeds share 75% of ...``."""
        shift = f", and a seed shifts all by {self.shift:.0%} of a difference's deviation" if self.shift else ""
        return (
            f"correlates {self.correlation:g} with {reference}, seeds share {self.shared:.0%} of the differences' "
            f"variance{shift}"
        )

    def differences(self, reference_sd: float, *, accuracy: bool) -> Differences:
        """Return the model of the differences from the standard deviation of the reference's documents."""
        sd = reference_sd * np.sqrt(2 * (1 - self.correlation))
        return Differences(float(sd), shared=self.shared, shift=float(self.shift * sd), accuracy=accuracy)


@dataclass(frozen=True)
class Differences:
    """The model of the differences between a method and its reference.

    Attributes:
        sd: σ, in the unit of the ratio (see `hfpatch.evaluation.metrics`).
        shared: κ.
        shift: τ.
        accuracy: differences are those of right and wrong answers: σ² is the discordance, the share of documents whose
            answer changes, so at least the difference itself.
    """

    sd: float
    shared: float
    shift: float = 0.0
    accuracy: bool = False

    def _variances(self, variance: float, documents: int, seeds: int) -> tuple[float, float]:
        """Return e₂², over documents, and e₁², over seeds, from σ²."""
        of_documents = variance * (self.shared + (1 - self.shared) / seeds) / documents
        return of_documents, (variance * (1 - self.shared) / documents + self.shift**2) / seeds

    def design(self, documents: int, seeds: int) -> Design:
        """Return the errors of a comparison with so many documents and seeds, at least two."""
        of_documents, of_seeds = self._variances(self.sd**2, documents, seeds)
        return Design((math.sqrt(of_documents), documents - 1), (math.sqrt(of_seeds), seeds - 1))

    def power(self, effect: float, documents: int, seeds: int, *, alpha: float = ALPHA) -> float:
        """Return the probability of finding a true difference at the level ``alpha``."""
        if self.accuracy and seeds == 1:  # McNemar's exact test, summed over the likely numbers of changed answers
            discordance = max(self.sd**2, abs(effect))
            low, high = binom.ppf([1e-9, 1 - 1e-9], documents, min(discordance, 1.0)).astype(int)
            changed = np.unique(np.linspace(low, high, min(high - low + 1, 2000)).astype(int))
            weights = binom.pmf(changed, documents, min(discordance, 1.0))
            gained = (1 + effect / discordance) / 2 if discordance else 0.5
            most = binom.ppf(alpha / 2, changed, 0.5)  # rejected with so few answers lost, or gained
            most = np.where(binom.cdf(most, changed, 0.5) <= alpha / 2, most, most - 1)
            rejected = binom.cdf(most, changed, gained) + binom.cdf(most, changed, 1 - gained)
            return float((weights * rejected).sum() / weights.sum())
        variance = max(self.sd**2, abs(effect)) - effect**2 if self.accuracy else self.sd**2
        of_documents, of_seeds = self._variances(variance, documents, seeds)
        tested, freedom = of_documents, documents - 1
        if self.accuracy:  # one document gained and one lost are added
            tested, freedom = (of_documents * documents**2 + 2) / ((documents + 1) * (documents + 2)), documents + 1
        parts: tuple[Part, ...] = (Part(np.sqrt(tested), freedom),)
        if seeds > 1:
            quantiles = chi2.ppf((np.arange(_POINTS) + 0.5) / _POINTS, seeds - 1) / (seeds - 1)
            parts += (Part(np.sqrt(of_seeds * quantiles), seeds - 1),)
        reach = Estimate(0.0, parts).reach(alpha)
        error = max(np.sqrt(of_documents + self.shift**2 / seeds), np.finfo(float).tiny)  # none if every answer changes
        return float(np.mean(norm.cdf((effect - reach) / error) + norm.cdf((-effect - reach) / error)))

    def smallest_effect(self, documents: int, seeds: int, *, alpha: float = ALPHA) -> float | None:
        """Return the difference that is found in 80 % of cases; None if there is none, as with too few documents."""
        largest = 1.0 if self.accuracy else 100 * (self.sd + self.shift)
        if documents < FEWEST_DOCUMENTS or self.power(largest, documents, seeds, alpha=alpha) < POWER:
            return None
        return float(brentq(lambda effect: self.power(effect, documents, seeds, alpha=alpha) - POWER, 0.0, largest))

    def documents_for(self, effect: float, seeds: int) -> int | None:
        """Return the documents that find a difference in 80 % of cases; None if no number does."""
        if self.power(effect, MOST_DOCUMENTS, seeds) < POWER:
            return None
        numbers = range(MOST_DOCUMENTS)
        return bisect_left(numbers, True, FEWEST_DOCUMENTS, key=lambda n: self.power(effect, n, seeds) >= POWER)

    def seeds_for(self, effect: float, documents: int) -> int | None:
        """Return the seeds, at least two, that find a difference in 80 % of cases; None if no number does."""
        if self.power(effect, documents, MOST_SEEDS) < POWER:
            return None
        return bisect_left(range(MOST_SEEDS), True, 2, key=lambda seeds: self.power(effect, documents, seeds) >= POWER)


ASSUMED: dict[str, dict[bool, Assumed]] = {
    "much": {True: Assumed(0.45, shared=0.5, shift=0.0), False: Assumed(0.7, shared=0.7, shift=0.03)},
    "little": {True: Assumed(0.85, shared=0.75, shift=0.0), False: Assumed(0.97, shared=0.9, shift=0.03)},
}
"""By how much a method changes the base, and by whether the metric is an accuracy. Measured with two seeds on the
quickstart's four tasks: pre-projections and LoRA change the embedded model ``much``, the nonlinear query ``little``."""

ASSUMED_OF_PAIRS: dict[str, dict[str, Assumed]] = {
    "gain": {
        "text": Assumed(0.97, shared=0.5, shift=0.13),
        "answers": Assumed(0.85, shared=0.4, shift=0.06),
        "accuracy": Assumed(0.55, shared=0.2, shift=0.03),
    },
    "keep": {
        "text": Assumed(0.9, shared=0.9, shift=0.1),
        "answers": Assumed(0.8, shared=0.75, shift=0.05),
        "accuracy": Assumed(0.55, shared=0.6, shift=0.01),
    },
}
"""The same of the pairs of primary questions: a method and the LoRA of its size (``gain``), or the base (``keep``), by
losses on texts, bits per byte of right answers and accuracies. Rounded medians over the pairs and tasks of the
comparisons in ``results``, between which the deviation of a pair differs by a factor of two to both sides."""
