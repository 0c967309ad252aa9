"""The size of an evaluation before it is run: its requests, the time of a batch, and the variance of documents."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpatch.evaluation.harness import quiet, templates_compiled_once
from hfpatch.evaluation.metrics import Metric, metric_named
from hfpatch.evaluation.model import Encoded, HfpatchLM
from hfpatch.evaluation.run import Storage, evaluate, hash_task, run_task, scorer_options
from hfpatch.evaluation.selection import Selection
from hfpatch.evaluation.stats import over_documents
from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.records import hash_documents, read_lines

_BATCHES = 4  # that are timed at most
ENOUGH = 8  # documents, below which their variance is not estimated


@dataclass
class TaskRequests:
    """The requests of a task.

    Attributes:
        identity: the fields of :data:`hfpatch.results.identity.OF_TASK`.
        encoded: log-likelihood requests, a document's together.
        generated: number of texts to generate.
    """

    documents: int
    identity: dict[str, str]
    encoded: list[Encoded] = field(default_factory=list)
    generated: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of contexts and continuations, without sharing between requests."""
        return sum(len(context) + len(targets) for _, context, targets in self.encoded)

    def first(self, tokens: int, longest: int) -> list[Encoded]:
        """Return the first whole documents that have so many tokens, with rows cut to ``longest``."""
        cut: list[Encoded] = []
        for texts, context, targets in self.encoded:
            if len(context) + len(targets) > longest:  # the last of the context, the first of the continuation
                targets = targets[: max(1, longest - 1)]
                context = context[-max(1, longest - len(targets)) :]
            cut.append((texts, context, targets))
        sizes = np.cumsum([len(context) + len(targets) for _, context, targets in cut])
        per_document = max(1, len(self.encoded) // max(1, self.documents))
        return cut[: -(-(int(np.searchsorted(sizes, tokens)) + 1) // per_document) * per_document]


@dataclass(frozen=True)
class Timed:
    """The time of all requests, in proportion to the operations of the scored ones, and the tokens of the latter."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Spread:
    """The variance of a task's documents under a model.

    Attributes:
        metric: the primary metric.
        documents: how many were scored.
        score: the model's score on them.
        sd: the standard deviation such that ``sd / √n`` is the standard error of the ratio over n documents; None
            where the metric is no ratio, or one document has all weight.
        accuracy: documents are right or wrong.
        exponential: the score is the exponential of the ratio.
        bits: the same by bits per byte, where the task has them and another primary metric.
    """

    metric: str
    documents: int
    score: float
    sd: float | None
    accuracy: bool = False
    exponential: bool = False
    bits: Spread | None = None


class _Collector(HfpatchLM):
    """Collects requests and scores nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.encoded: list[Encoded] = []
        self.generated = 0

    def _loglikelihood_tokens(
        self, encoded: Sequence[Encoded], requests: Sequence[Any] = ()
    ) -> list[tuple[float, bool]]:
        indices, _ = self._cut(encoded, requests)
        self.encoded += [(None, *encoded[index][1:]) for index in indices]
        return [(0.0, False)] * len(encoded)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self._add_prompts(requests)
        self.generated += len(requests)
        return [""] * len(requests)


def collect_requests(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, selection: Selection
) -> dict[str, TaskRequests]:
    """Return the requests of each task, without scoring anything; errors are those of `evaluate`."""
    settings, by_task = selection.settings, {}
    with quiet(), templates_compiled_once():
        options = scorer_options(tokenizer, settings)
        for name, task in selection.tasks.items():
            collector = _Collector(model, **options)
            samples = run_task(collector, name, selection).output["samples"][name]
            hashes = {sample["doc_id"]: sample["doc_hash"] for sample in samples}
            identity = {
                "data_sha256": hash_documents(hashes[number] for number in sorted(hashes)),
                "task_sha256": hash_task(task, settings.seed),
                **collector.prompts.to_json(),
            }
            by_task[name] = TaskRequests(len(hashes), identity, collector.encoded, collector.generated)
    return by_task


def row_operations(model: Any, lengths: ArrayLike) -> NDArray[np.float64]:
    """Return the floating-point operations of forward passes over rows of n tokens each.

    .. math::
        n (2 w + 4 d Σ_i min(n, r_i))      w: weights in matrix products; d: hidden size; r_i: reach of block i

    Embeddings are free. Attention computes whole squares, with their masked half.
    """
    config, rows = model.config.get_text_config(), np.asarray(lengths, np.float64)
    head = getattr(model.get_output_embeddings(), "weight", None)
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(head)}
    weights = sum(value.numel() for value in model.parameters() if value.ndim > 1 and id(value) not in lookups)
    window, blocks = getattr(config, "sliding_window", None), config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * blocks
    reach = sum(np.minimum(rows, window) if "sliding" in kind and window else rows for kind in kinds)
    return np.asarray(rows * (2.0 * weights + 4.0 * config.hidden_size * reach))


def time_requests(scorer: HfpatchLM, asked: TaskRequests, seconds: float) -> Timed:
    """Time as many batches of a task's requests as there are seconds for, at least one.

    A batch before them is not timed: in it the scorer tries how the model may be run, as it does for all requests,
    where these trials cost little.
    """
    if not asked.encoded:
        return Timed(0.0, 0)
    with quiet():
        scorer._scorer().weigh_trials = False
        limits = scorer._scorer().limits

        def score(batches: int) -> tuple[list[Encoded], float]:
            chosen = asked.first(batches * limits.tokens, longest=batches * limits.tokens)
            start = time.perf_counter()
            scorer._loglikelihood_tokens(chosen)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return chosen, time.perf_counter() - start

        _, first_s = score(1)
        chosen, taken_s = score(max(1, min(_BATCHES, int(seconds / first_s))))

    operations = []  # of all requests, and of the timed ones
    for requests in (asked.encoded, chosen):
        rows = [len(context) + len(targets) for _, context, targets in requests]
        overhead = -(-sum(rows) // limits.tokens) * limits.overhead * row_operations(scorer.model, 1)
        operations.append(float(row_operations(scorer.model, rows).sum() + overhead))
    return Timed(taken_s * operations[0] / operations[1], sum(rows))


def base_spread(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, one: Selection) -> Spread:
    """Return the variance of the documents of a selection's only task."""
    (name,) = one.tasks
    with tempfile.TemporaryDirectory() as folder:
        result = evaluate(model, tokenizer, one, storage=Storage(records=Path(folder)))[name]
        rows = read_lines(Path(folder) / f"{name}.jsonl")
    primary, bits = result.primary.partition(",")[0], None
    if BITS_PER_BYTE in result.metrics and result.primary != BITS_PER_BYTE:
        values = [row[BITS_PER_BYTE] for row in rows]
        bits = _spread_of(BITS_PER_BYTE, values, metric_named(BITS_PER_BYTE), result.metrics[BITS_PER_BYTE])
    metric = metric_named(primary, one.tasks[name].aggregation()[primary])
    values, score = [row[result.primary] for row in rows], result.metrics[result.primary]
    return replace(_spread_of(result.primary, values, metric, score), bits=bits)


def _spread_of(name: str, values: Sequence[Any], metric: Metric, score: float) -> Spread:
    """Return the variance of documents from their values of a metric."""
    if metric.aggregate is not None or len(values) < 2:
        return Spread(name, len(values), score, None)
    terms, weights = metric.ratio_terms(values)
    accuracy = bool(np.isin(terms, (0.0, 1.0)).all() and (weights == 1).all())
    if accuracy:  # one right and one wrong are added, without which a few documents may all agree
        right = float(terms.sum() + 1) / (len(terms) + 2)
        sd = math.sqrt(right * (1 - right))
    else:
        sd = over_documents(terms, weights).error * math.sqrt(len(terms))
    return Spread(name, len(values), score, sd if math.isfinite(sd) else None, accuracy, metric.exponential)
