"""The size of an evaluation before it is run: its requests, the time of a batch, and how much documents vary."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpatch.evaluation.harness import quiet, templates_compiled_once
from hfpatch.evaluation.metrics import metric_named, ratio_error
from hfpatch.evaluation.model import Encoded, HfpatchLM
from hfpatch.evaluation.run import evaluate, primary_aggregations, run_task, scorer_options
from hfpatch.evaluation.selection import select
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.records import read_lines
from hfpatch.results.schema import TaskResult

_SAMPLE_TOKENS = {"cpu": 1 << 14}  # of the base's sample of each task
_SAMPLE_TOKENS_ELSEWHERE = 1 << 18
_BATCHES = 4  # that are timed
_FEWEST, _MOST = 20, 400  # documents of a sample


@dataclass
class TaskRequests:
    """What a task asks of a model.

    Attributes:
        documents: its documents.
        encoded: its log-likelihood requests, a document's together.
        generated: texts to generate.
    """

    documents: int
    encoded: list[Encoded] = field(default_factory=list)
    generated: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of contexts and continuations, each request by itself."""
        return count_tokens(self.encoded)

    def first(self, tokens: int) -> list[Encoded]:
        """Return the first requests that have so many tokens together; at least one."""
        sizes = np.cumsum([count_tokens([request]) for request in self.encoded])
        return self.encoded[: int(np.searchsorted(sizes, tokens)) + 1]


@dataclass(frozen=True)
class Spread:
    """How the documents of a task vary under a model.

    Attributes:
        metric: the primary metric.
        documents: how many were scored.
        score: the model's score on them.
        sd: the standard deviation such that ``sd / √n`` is the standard error of the ratio over n documents; None
            where the metric is no ratio.
        accuracy: documents are right or wrong.
        exponential: the score is the exponential of the ratio.
    """

    metric: str
    documents: int
    score: float
    sd: float | None
    accuracy: bool = False
    exponential: bool = False


class _Collector(HfpatchLM):
    """Notes what it is asked for, and scores nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.encoded: list[Encoded] = []
        self.generated = 0

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        self._cut(requests)  # refuses what cannot be scored
        self.encoded += [(None, context, targets) for _, context, targets in requests]
        return [(0.0, False)] * len(requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self.generated += len(requests)
        return [""] * len(requests)


def count_tokens(requests: Sequence[Encoded]) -> int:
    """Return the tokens of contexts and continuations."""
    return sum(len(context) + len(targets) for _, context, targets in requests)


def collect_requests(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EvaluationSettings, data_dir: Path | None
) -> dict[str, TaskRequests]:
    """Return what each task asks for, without scoring anything.

    Raises:
        HfpatchError: as `evaluate`.
    """
    found = {}
    with quiet(), templates_compiled_once():
        chosen = select(settings, data_dir)
        options = scorer_options(tokenizer, settings)
        for name, task in chosen.tasks.items():
            collector = _Collector(model, **options)
            samples = run_task(collector, name, task, settings, chosen.limits[name])["samples"][name]
            documents = len({sample["doc_id"] for sample in samples})
            found[name] = TaskRequests(documents, collector.encoded, collector.generated)
    return found


def time_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EvaluationSettings, asked: TaskRequests
) -> float:
    """Return the seconds that all requests of a task take, in proportion to those of a few batches.

    They are scored once before that, in which the scorer finds out how the model may be run.
    """
    if not asked.encoded:
        return 0.0
    with quiet():
        scorer = HfpatchLM(model, **scorer_options(tokenizer, settings))
        chosen = asked.first(_BATCHES * scorer._scorer().limits.tokens)
        for _ in range(2):
            start = time.perf_counter()
            scorer._loglikelihood_tokens(chosen)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
    return seconds * asked.tokens / count_tokens(chosen)


def base_spread(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
    data_dir: Path | None,
    asked: dict[str, TaskRequests],
) -> dict[str, Spread]:
    """Return how the first documents of each task vary under the model; tasks that generate text are left out."""
    budget = _SAMPLE_TOKENS.get(model.device.type, _SAMPLE_TOKENS_ELSEWHERE)
    spreads, chosen = {}, select(settings, data_dir)
    for name, each in asked.items():
        if each.generated or not each.encoded:
            continue
        size = max(1, each.tokens // each.documents)
        limit = min(each.documents, max(_FEWEST, min(_MOST, budget // size)))
        one = chosen.only(name, limit)
        with tempfile.TemporaryDirectory() as folder:
            result = evaluate(model, tokenizer, settings=settings, selection=one, records_dir=Path(folder))[name]
            values = [record[result.primary] for record in read_lines(Path(folder) / f"{name}.jsonl")]
        spreads[name] = _spread(result, values, one.tasks)
    return spreads


def _spread(result: TaskResult, values: list[Any], tasks: Mapping[str, Any]) -> Spread:
    aggregation = primary_aggregations(tasks, {result.task: result})[result.task]
    metric = metric_named(result.primary.partition(",")[0], aggregation=aggregation)
    score = result.metrics[result.primary]
    if metric.aggregate is not None or len(values) < 2:
        return Spread(result.primary, result.n, score, None)
    terms, weights = metric.ratio_terms(values)
    accuracy = bool(np.isin(terms, (0.0, 1.0)).all() and (weights == 1).all())
    sd = ratio_error(terms, weights) * np.sqrt(len(terms))
    if accuracy:  # one right and one wrong are added, without which a few documents may all agree
        right = (terms.sum() + 1) / (len(terms) + 2)
        sd = np.sqrt(right * (1 - right))
    return Spread(result.primary, result.n, score, float(sd), accuracy, metric.exponential)
