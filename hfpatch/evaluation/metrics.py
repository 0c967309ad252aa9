"""How a task's score is computed from its documents, in the form that all statistics use.

Most metrics are a ratio of sums over documents, ``r = Σ aᵢ / Σ cᵢ``, or the exponential of one. An accuracy has ``aᵢ``
0 or 1 and ``cᵢ = 1``; a word perplexity is ``exp(r)`` with ``aᵢ`` the negative log-likelihood of a document and ``cᵢ``
its words. lm-eval gives one value per document and the function that aggregates them; that function decides, not the
metric's name. All other metrics (F1, Matthews correlation, BLEU, median) are functions of resampled documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hfpatch.results.low_noise import GOLD_PROBABILITY, MARGIN
from hfpatch.results.parts import NATS_PER_TOKEN, TaskResult
from hfpatch.results.retention import AGREEMENT, FORGETTING, KL

Array = NDArray[np.float64]
Aggregation = Callable[[Sequence[Any]], float]


@dataclass(frozen=True)
class Metric:
    """How a metric's per-document values enter the score.

    Attributes:
        exponential: the score is ``exp(r)``, so that models are compared by the difference of ``r``, a log ratio.
        factor: a document's (first) value times it is ``aᵢ``.
        weighted: a document's value is a pair, whose second part is ``cᵢ``; else ``cᵢ`` is 1.
        aggregate: lm-eval's function from the documents' values to the score where that is no ratio; else None.
    """

    exponential: bool = False
    factor: float = 1.0
    weighted: bool = False
    aggregate: Aggregation | None = None

    def ratio_terms(self, values: Sequence[Any]) -> tuple[Array, Array]:
        """Return ``a`` and ``c``, each (documents,), from values, whose shape must be the metric's (a `ValueError`)."""
        table = np.asarray(values, dtype=np.float64)
        if table.shape[1:] != ((2,) if self.weighted else ()):
            raise ValueError(f"values of shape {table.shape} are not those of a {'weighted ' * self.weighted}mean")
        if self.weighted:
            return self.factor * table[:, 0], table[:, 1]
        return self.factor * table, np.ones(len(table))

    def overall(self, values: Sequence[Any]) -> float:
        """Return the metric's value over documents, from their values."""
        if self.aggregate is not None:
            return float(self.aggregate(values))
        terms, weights = self.ratio_terms(values)
        ratio = terms.sum() / weights.sum()
        with np.errstate(over="ignore"):
            return float(np.exp(ratio) if self.exponential else ratio)

    def shift(self, reference: float, difference: float) -> float:
        """Return a ``difference`` in ``r`` from a ``reference`` value of ``r``, in the metric's unit."""
        if not self.exponential:
            return difference
        with np.errstate(over="ignore", invalid="ignore"):  # perplexities beyond the largest number are infinite
            return float(np.exp(reference) * np.expm1(difference))


_RATIOS = {
    "lm_eval.api.metrics.mean": Metric(),
    "lm_eval.api.metrics.perplexity": Metric(exponential=True, factor=-1.0),
    "lm_eval.api.metrics.weighted_perplexity": Metric(exponential=True, factor=-1.0, weighted=True),
    "lm_eval.api.metrics.bits_per_byte": Metric(factor=-1.0 / math.log(2.0), weighted=True),
    "hfpatch.evaluation.paper_tasks.exponential_mean": Metric(exponential=True),
}
"""The aggregations that are ratios of sums, by module and name."""
_OF_HFPATCH = {
    "paragraph_perplexity": Metric(exponential=True),
    NATS_PER_TOKEN: Metric(factor=-1.0, weighted=True),
    **dict.fromkeys((GOLD_PROBABILITY, MARGIN), Metric()),
    **dict.fromkeys((KL, AGREEMENT, FORGETTING), Metric(weighted=True)),
}
"""hfpatch's metrics that lm-eval does not know, by name."""

_PRIMARY_OF_TASK = {"hellaswag": "acc_norm"}
_PRIMARY = ("acc", "word_perplexity", "paragraph_perplexity", "exact_match")


def metric_named(name: str, aggregation: Aggregation | None = None) -> Metric:
    """Return the metric of lm-eval's name.

    ``aggregation`` is the task's function from documents to score; None takes lm-eval's for this name, else a mean.
    """
    from lm_eval.api.registry import get_metric_aggregation

    if aggregation is None and name in _OF_HFPATCH:
        return _OF_HFPATCH[name]
    function = aggregation or get_metric_aggregation(name)
    if function is None:
        return Metric()
    path = f"{function.__module__}.{getattr(function, '__qualname__', '')}"
    return _RATIOS.get(path) or Metric(aggregate=function)


def metric_of(result: TaskResult, aggregations: Mapping[str, Aggregation]) -> Metric:
    """Return the primary metric of a task's result, by the task's own ``aggregations`` by name if it has any."""
    name = result.primary.partition(",")[0]
    return metric_named(name, aggregations.get(name))


def primary_metric(task: str, metrics: Sequence[str]) -> str:
    """Return the primary metric of a task: the customary one, else the first."""
    order = (_PRIMARY_OF_TASK.get(task, ""), *_PRIMARY)
    return next((name for name in order if name in metrics), metrics[0])
