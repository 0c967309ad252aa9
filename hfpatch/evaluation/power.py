"""What is assumed of differences before a comparison is run, where no earlier one has measured their variances.

In the model, the difference of a method and its reference on document i with seed s is

    d[s, i] = θ + u[i] + v[s, i] + w[s]        Var(u) = σ²·κ,  Var(v) = σ²·(1 - κ),  Var(w) = τ²

θ is the true difference, σ the standard deviation of a document's difference in one run, κ the share of its variance
that all seeds have in common, and τ the shift of all documents by a seed. With n documents and S seeds the mean has the
variance ``(σ²κ + σ²(1 - κ)/S)/n + τ²/S``. Tests estimate its parts as `hfpatch.evaluation.stats` does: over documents
``e₂² = σ²(κ + (1 - κ)/S)/n``, over seeds ``e₁² = (σ²(1 - κ)/n + τ²)/S`` times a chi-square with S - 1 degrees of
freedom over S - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfpatch.results.decision import Design


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

    def design(self, reference_sd: float, documents: int, seeds: int) -> Design:
        """Return the errors of a comparison with so many documents and seeds, at least two.

        ``reference_sd`` is the standard deviation of the reference's documents.
        """
        variance = 2 * (1 - self.correlation) * reference_sd**2
        of_documents = variance * (self.shared + (1 - self.shared) / seeds) / documents
        of_seeds = variance * ((1 - self.shared) / documents + self.shift**2) / seeds
        return Design((math.sqrt(of_documents), documents - 1), (math.sqrt(of_seeds), seeds - 1))


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
"""Of the pairs of primary questions: a method and the LoRA of its size (``gain``), or the base (``keep``), by losses on
texts, bits per byte of right answers and accuracies. Rounded medians over the pairs and tasks of the comparisons in
``results``, between which the deviation of a pair differs by a factor of two to both sides."""
