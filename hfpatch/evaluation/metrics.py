"""How a task's score follows from its documents: the form all statistics work on.

Every metric here is a ratio of sums over documents, ``r = Σ aᵢ / Σ cᵢ``, or the exponential of one. An accuracy has
``aᵢ`` 0 or 1 and ``cᵢ = 1``; a word perplexity is ``exp(r)`` with ``aᵢ`` the negative log-likelihood of a document and
``cᵢ`` its words. lm-eval hands out one value a document, a number or a pair ``(log-likelihood, count)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A metric's direction and how its per-document values enter the ratio.

    Attributes:
        higher_is_better: the direction.
        exponential: the score is ``exp(r)``, so that models are compared by the difference of ``r``, a log ratio.
        factor: what a document's (first) value is multiplied by to give ``aᵢ``.
    """

    higher_is_better: bool = True
    exponential: bool = False
    factor: float = 1.0

    def ratio_terms(self, values: Sequence[Any]) -> tuple[Array, Array]:
        """Return ``a`` and ``c``, each (documents,), from the per-document values."""
        pairs = [value if isinstance(value, list | tuple) else (value, 1.0) for value in values]
        table = np.asarray(pairs, dtype=np.float64)
        return self.factor * table[:, 0], table[:, 1]

    def score(self, ratio: float) -> float:
        """Return the metric's value for a ratio ``r``."""
        return math.exp(ratio) if self.exponential else ratio

    def shift(self, reference: float, difference: float) -> float:
        """Return what a ``difference`` in ``r`` means in the metric's unit, from a ``reference`` value of ``r``."""
        return math.exp(reference) * math.expm1(difference) if self.exponential else difference


_METRICS = {
    "perplexity": Metric(higher_is_better=False, exponential=True, factor=-1.0),
    "word_perplexity": Metric(higher_is_better=False, exponential=True, factor=-1.0),
    "byte_perplexity": Metric(higher_is_better=False, exponential=True, factor=-1.0),
    "bits_per_byte": Metric(higher_is_better=False, factor=-1.0 / math.log(2.0)),
    "paragraph_perplexity": Metric(higher_is_better=False, exponential=True),
}

_PRIMARY_OF_TASK = {"hellaswag": "acc_norm"}
_PRIMARY = ("acc", "word_perplexity", "paragraph_perplexity", "exact_match")


def ratio_error(terms: Array, weights: Array) -> float:
    """Return the standard error of ``Σ terms / Σ weights`` over documents (delta method), both (documents,)."""
    residuals = terms - terms.sum() / weights.sum() * weights
    return float(np.sqrt(len(terms)) * residuals.std(ddof=1) / weights.sum())


def metric_named(name: str, *, higher_is_better: bool = True) -> Metric:
    """Return the metric of this name; one that is not known is a mean over documents with the direction given."""
    return _METRICS.get(name, Metric(higher_is_better=higher_is_better))


def primary_metric(task: str, metrics: Sequence[str]) -> str:
    """Return the metric that stands for a task: lm-eval's customary one, else the first."""
    order = (_PRIMARY_OF_TASK.get(task, ""), *_PRIMARY)
    return next((name for name in order if name in metrics), metrics[0])
