"""Low-noise metrics, from the log-likelihoods that a task scores for its decisions.

An accuracy changes only where a decision does. With p(t) the probability that a model gives the text t of an answer
after its context, R the right answers of a document, W its wrong ones, and |t| the number of UTF-8 bytes of t:

    bits_per_byte    = Σ over documents and t in R of -log₂ p(t)  /  Σ over documents and t in R of |t|
    gold_probability = mean over documents of  Σ over t in R of p(t) / Σ over t in R or W of p(t)
    margin           = mean over documents of  max over R of log p(t) - max over W of log p(t)         in nats

A margin is that of whole answers, as the probability is: where it is positive, lm-eval's ``acc`` is 1. Of several right
answers ``bits_per_byte`` takes all, so that its bytes are the same for every model, and the others their sum and the
best of them, as lm-eval's accuracy counts any of them.

|t| counts the whole text that p(t) scores: the answer with lm-eval's delimiter before it, usually a space, and with the
white space that the tokenizer takes over from the end of the context. lm-eval's ``acc_norm`` divides by the characters
of the answer alone, and ``acc_bytes`` by its bytes, without the delimiter.

Tasks that score one continuation (LAMBADA) or whole texts (WikiText) have only ``bits_per_byte``, whole texts lm-eval's
own where the task has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from lm_eval.api.task import ConfigurableTask

from hfpatch.evaluation.metrics import Array, metric_named
from hfpatch.results.low_noise import BITS_PER_BYTE, GOLD_PROBABILITY, MARGIN

Values = dict[str, Any]
"""The value of each low-noise metric of a document: a number, or a pair (log-likelihood, bytes)."""


def low_noise_values(task: Any, samples: Sequence[Mapping[str, Any]]) -> dict[int, Values]:
    """Return the low-noise metrics of every document, by ``doc_id``, that the task does not have itself.

    All documents have the same ones: if one has no right answer among the choices, or no wrong one, none has any.
    ``samples`` are lm-eval's, with the arguments of all requests and the responses.
    """
    by_document: dict[int, Values] = {}
    for sample in samples:
        requests, scores = sample["arguments"], [responses[0] for responses in sample["resps"]]
        if task.OUTPUT_TYPE == "loglikelihood" and len(requests) == 1:
            values: Values = {BITS_PER_BYTE: (scores[0][0], scored_bytes(*requests[0][:2]))}
        elif task.OUTPUT_TYPE == "loglikelihood_rolling" and isinstance(scores[0], float):
            values = {BITS_PER_BYTE: (scores[0], scored_bytes("", requests[0][0]))}
        elif task.OUTPUT_TYPE == "multiple_choice" and isinstance(task, ConfigurableTask):
            answers, right = _choices(task, sample)
            logs: Array = np.array([score[0] for score in scores[:answers]], dtype=np.float64)
            sizes = np.array([scored_bytes(*request[:2]) for request in requests[:answers]])
            is_right = np.isin(np.arange(answers), right)
            if not 0 < is_right.sum() < answers:
                return {}
            if callable(task.config.process_results) and sample.get("acc") != float(is_right[logs.argmax()]):
                return {}  # its own function takes another answer than its target as right: TruthfulQA, tests of bias
            with np.errstate(invalid="ignore"):  # if all answers are impossible
                shares = np.exp(logs - logs.max())
                values = {
                    BITS_PER_BYTE: (float(logs[is_right].sum()), int(sizes[is_right].sum())),
                    GOLD_PROBABILITY: float(shares[is_right].sum() / shares.sum()),
                    MARGIN: float(logs[is_right].max() - logs[~is_right].max()),
                }
        else:
            return {}
        by_document[sample["doc_id"]] = {name: value for name, value in values.items() if name not in sample["metrics"]}
    return by_document


def low_noise_scores(values: Mapping[int, Values]) -> dict[str, float]:
    """Return each metric over all documents; none if one is not finite, because a right answer is impossible."""
    names = next(iter(values.values()), {})
    scores = {name: metric_named(name).overall([value[name] for value in values.values()]) for name in names}
    return scores if all(map(math.isfinite, scores.values())) else {}


def scored_bytes(context: str, continuation: str) -> int:
    """Return the UTF-8 bytes that a request scores, with the white space that lm-eval moves from the context's end."""
    return len((context[len(context.rstrip()) :] + continuation).encode("utf-8"))


def chance(task: Any, samples: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Return the score of guessing: the mean over documents of the share of their choices that are right.

    It is None for tasks of another kind, for tasks with their own scoring function, and for metrics (``metric`` is the
    task's primary one) that are no ``acc``.
    """
    is_choice = task.OUTPUT_TYPE == "multiple_choice" and isinstance(task, ConfigurableTask)
    if not is_choice or callable(task.config.process_results) or not metric.startswith("acc"):
        return None
    shares = []
    for sample in samples:
        choices, right = _choices(task, sample)
        shares.append(len(set(right) & set(range(choices))) / max(1, choices))
    return fmean(shares) if shares and all(0 < share < 1 for share in shares) else None


def ties(task: Any, samples: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many documents of a task of several choices have several likeliest ones; None if none has.

    lm-eval's accuracy takes the first of them as the model's decision.
    """
    if task.OUTPUT_TYPE != "multiple_choice" or not isinstance(task, ConfigurableTask):
        return None
    tied = set()
    for sample in samples:
        scores = [responses[0][0] for responses in sample["resps"][: _choices(task, sample)[0]]]
        if scores.count(max(scores)) > 1:
            tied.add(sample["doc_id"])
    return len(tied) or None


def _choices(task: ConfigurableTask, sample: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return the number of a document's choices, and the places of the right ones, as lm-eval finds them."""
    count = len(sample["arguments"]) // (2 if "acc_mutual_info" in sample["metrics"] else 1)  # also without the context
    gold = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
    if isinstance(gold, str):
        choices = task.doc_to_choice(sample["doc"])
        return count, [choices.index(gold)] if gold in choices else []
    return count, gold if isinstance(gold, list) else [gold]
