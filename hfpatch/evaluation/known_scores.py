"""Published scores of base models, against which a base is held before anything is compared with it.

A base far below its published score is broken (a wrong dtype, revision or tokenizer), and what repairs it looks like a
gain. The dtype is part of what is known: scores measured in fp32 or fp16 say nothing about bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hfpatch.evaluation.results import TaskResult

_EXACT_DTYPES = ("float32", "float16")
_SIGMAS = 3.0


@dataclass(frozen=True)
class KnownScore:
    """A published zero-shot score with its standard error.

    Attributes:
        model: hub id.
        revisions: hub revisions that are this checkpoint.
        task: lm-eval task.
        metric: lm-eval metric.
        value: the score.
        error: its standard error.
        dtypes: dtypes it holds for.
        source: where it was published.
    """

    model: str
    revisions: tuple[str, ...]
    task: str
    metric: str
    value: float
    error: float
    dtypes: tuple[str, ...]
    source: str


def _pythia(size: str, revisions: tuple[str, ...], task: str, value: float, error: float) -> KnownScore:
    source = f"EleutherAI/pythia, published zero-shot evaluations, pythia-{size}, {revisions[0]}"
    return KnownScore(f"EleutherAI/pythia-{size}", revisions, task, "acc", value, error, _EXACT_DTYPES, source)


_LAST = ("step143000", "main")

KNOWN_SCORES = (
    _pythia("410m", _LAST, "lambada_openai", 0.516, 0.007),
    _pythia("410m", _LAST, "arc_easy", 0.521, 0.010),
    _pythia("160m", ("step123000",), "lambada_openai", 0.331, 0.007),
)


def check_known_scores(
    model_name: str, revision: str | None, dtype: str, results: Mapping[str, TaskResult]
) -> list[str]:
    """Return one sentence for each result that lies outside a published score; none where nothing is known.

    A result is outside if it is more than three standard errors away, its own and the published one taken together.

    Args:
        model_name: the base's hub id.
        revision: its hub revision; None is ``main``.
        dtype: what it was evaluated in, such as ``float32``.
        results: its results by task.
    """
    known = [
        score
        for score in KNOWN_SCORES
        if score.model.lower() == model_name.lower() and (revision or "main") in score.revisions
    ]
    return [
        sentence
        for score in known
        if dtype in score.dtypes and score.task in results
        for sentence in _violation(score, results[score.task])
    ]


def _violation(known: KnownScore, result: TaskResult) -> list[str]:
    if result.num_fewshot or known.metric not in result.metrics:
        return []
    value = result.metrics[known.metric]
    sampling = math.sqrt(known.value * (1 - known.value) / result.n)
    tolerance = _SIGMAS * math.hypot(known.error, sampling)
    if abs(value - known.value) <= tolerance:
        return []
    return [
        f"{known.model} scores {value:.3f} on {known.task} ({known.metric}, {result.n} documents), "
        f"but {known.value:.3f} ± {tolerance:.3f} is known ({known.source}): "
        "check revision, dtype and tokenizer before comparing anything with it."
    ]
