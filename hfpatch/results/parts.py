"""The parts of all results: numbers in JSON, a training's outcome, a task's scores, a paired difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from hfpatch.results.decision import ALPHA, Design, reach
from hfpatch.results.low_noise import BITS_PER_BYTE

SCHEMA: Literal[2] = 2
"""The version of the layout; a file of another one is refused."""

NATS_PER_TOKEN = "nats_per_token"
"""Its metric: of a document the pair (log-likelihood, tokens); the score is ``-Σ log-likelihood / Σ tokens``."""

Values = dict[str, Any]
"""Settings, versions and the like, as they are in recipes and libraries."""


def _identified(model: Values) -> Values:
    for key in ("name", "sha256"):
        if not isinstance(model.get(key), str):
            raise ValueError(f"{key} must be a string that names the model, not {model.get(key)!r}")
    return model


ModelFacts = Annotated[Values, AfterValidator(_identified)]
"""Which model was evaluated: its name and its hash, revision, dtype and the like."""


def _numbers(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if isinstance(item, int | float) and not isinstance(item, bool)}


def _or_null(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Numbers = Annotated[dict[str, float], BeforeValidator(_numbers)]
"""Names and numbers; other values are left out (lm-eval writes "N/A" for a standard error that is not known)."""

Errors = Annotated[
    Numbers, AfterValidator(lambda errors: {name: error for name, error in errors.items() if math.isfinite(error)})
]
"""The finite standard errors by name."""

# Each reads the value that it wrote: JSON has no number that is not finite.


def _or(other: float) -> BeforeValidator:
    """Take ``other`` for null and for every number that is not finite."""
    return BeforeValidator(
        lambda value: other if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
    )


Low = Annotated[float, _or(-math.inf), PlainSerializer(_or_null, float | None)]
High = Annotated[float, _or(math.inf), PlainSerializer(_or_null, float | None)]
"""The ends of an interval; null in the file where it is unbounded, as with too few documents."""
Number = Annotated[float, _or(math.nan), PlainSerializer(_or_null, float | None)]
"""A measured value, NaN where it was not finite."""
Measured = Annotated[float | None, AfterValidator(_or_null)]
"""A value that is None where it was not measured, or was not finite."""


class Part(BaseModel):
    """A part of the results; what is None is null in the file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        return self.model_dump(mode="json", by_alias=True)


_OF_METHODS = {
    "method", "methods", "reference", "other", "to", "chosen", "points", "growing", "left_out", "baseline",
}  # fmt: skip
"""Fields of parts that have names of methods: one, a list of them, or as keys."""


def with_names(value: Any, names: Mapping[str, str], *, of_methods: bool = False) -> Any:
    """Return a part of results with other names of methods; a name that ``names`` does not have stays.

    Args:
        value: a part, or what is in one.
        names: old name -> new name.
        of_methods: whether strings in ``value`` are names of methods.
    """
    match value:
        case Part():
            fields = type(value).model_fields
            new = {one: with_names(getattr(value, one), names, of_methods=one in _OF_METHODS) for one in fields}
            return value.model_copy(update=new)
        case str() if of_methods:
            return names.get(value, value)
        case list():
            return [with_names(item, names, of_methods=of_methods) for item in value]
        case dict():
            return {names.get(key, key) if of_methods else key: with_names(item, names) for key, item in value.items()}
    return value


class TrainResult(Part):
    """The outcome of a finished training.

    Attributes:
        steps: optimiser steps, the one at which a run diverged included.
        final_loss: the last finite loss of a step, in nats per token.
        tokens: tokens seen, padding not counted.
        wall_s: seconds of all steps together, those before a resumption included.
        tokens_per_s: ``tokens / wall_s``.
        peak_memory_bytes: CUDA's peak, or the process's resident peak; of the last session only.
        update_survival: share of weights that an optimiser step really changed, by group and for ``all``;
            see :func:`hfpatch.training.diagnostics.counting_survival`.
        final_eval_loss: nats per token on the evaluation blocks at the end, where there are any.
        best_eval_loss: the lowest of all evaluations, where there were any.
        best_step: the step after which it was measured.
        skipped_steps: how many updates were left out because loss or gradient were not finite.
        stopped_early: whether early stopping ended the run before the plan did.
        diverged_step: the step that ended a run which diverged: its loss or gradient was not finite, or its loss or
            that of the evaluation blocks after it was above pretraining's bound. Its update was left out unless the
            loss after it said so.
        mfu: the share of the measured rate of a large matrix product that the steps reached; a lower bound, see
            :func:`hfpatch.training.hardware.flops_per_token`.
        matmul: the library of the matrix products on the CPU, see :mod:`hfpatch.support.cpu`.
    """

    steps: int
    final_loss: Number
    tokens: int
    wall_s: float
    tokens_per_s: float
    peak_memory_bytes: int
    update_survival: Numbers = Field(default_factory=dict)
    final_eval_loss: Measured = None
    best_eval_loss: Measured = None
    best_step: int | None = None
    skipped_steps: int = 0
    stopped_early: bool = False
    diverged_step: int | None = None
    mfu: Measured = None
    matmul: str | None = None


class Clusters(Part):
    """The groups that a task's documents come in, such as several questions on one passage.

    Attributes:
        column: the column of the documents whose value makes them one group; empty where none was declared.
        groups: how many groups there are; standard errors, intervals and tests take these as independent.
        run: how many neighbours make a group, where neighbouring documents (or groups) vary together though they were
            declared to be independent; else None.
        p: of their independence, see :mod:`hfpatch.evaluation.dependence`.
    """

    column: str
    groups: Annotated[int, Field(ge=0)]
    run: int | None = None
    p: float | None = None

    @property
    def text(self) -> str:
        """The groups in words."""
        if self.run is None:
            return f"{self.groups:,} groups of {self.column}"
        return f"{self.groups:,} groups of {self.run} neighbours"


class FewShot(Part):
    """What is to be known of a task's few-shot examples.

    Attributes:
        own_left_out: whether prompts differ from lm-eval's, which shows documents among their own examples, with the
            answer.
        related: documents that have an example of their own group, see :class:`Clusters`.
    """

    own_left_out: bool = False
    related: int = 0


class LeftOut(Part):
    """The documents of a task that have no score, as their context and their answer share a token, say.

    Attributes:
        documents: how many.
        first: the index of the first one.
        why: why that one has none.
    """

    documents: int
    first: int
    why: str


class Task(Part):
    """What the scores of all models on one task share.

    Attributes:
        primary: the metric that comparisons use for the task.
        higher_is_better: the direction of the primary metric.
        n: documents scored.
        num_fewshot: examples before each question.
        data_sha256: hash of the scored documents, in order.
        prompts_sha256: hash of the prompts, in order, as text.
        tokens_sha256: hash of the token ids of that, as they were computed.
        task_sha256: hash of what turns answers into scores: the task's configuration and code.
        version: the task definition's version.
        clusters: the groups that the documents come in; None where they are taken as independent.
        chance: the primary metric of guessing, where a task of several choices has one; else None.
        few_shot: where its few-shot examples are not lm-eval's, or say much of a document; else None.
        left_out: its documents that cannot be scored, which ``n`` does not count; None if there are none.
    """

    primary: str
    higher_is_better: bool
    n: Annotated[int, Field(ge=0)]
    num_fewshot: int = 0
    data_sha256: str
    prompts_sha256: str
    tokens_sha256: str
    task_sha256: str
    version: str
    clusters: Clusters | None = None
    chance: Annotated[float, Field(ge=0, le=1)] | None = None
    few_shot: FewShot | None = None
    left_out: LeftOut | None = None

    @property
    def is_text(self) -> bool:
        """Whether it scores whole texts, by perplexity, bits per byte or nats per token."""
        return any(name in self.primary for name in ("perplexity", BITS_PER_BYTE, NATS_PER_TOKEN))


class Score(Part):
    """The numbers of one model on one task.

    Attributes:
        metrics: each metric's value, as lm-eval defines it, and the low-noise metrics, see
            :mod:`hfpatch.evaluation.low_noise`.
        stderr: the standard error over documents of each metric that has a finite one.
        starts: of the base on held-out text the nats per token at the first tokens of documents (``documents``) and of
            blocks that begin inside one (``inside``), where there are such; else None.
        ties: documents with several likeliest choices, of which the accuracy takes the first; None if there are none.
        reused: requests whose answers were kept from an earlier evaluation and not scored again. It says how the result
            was obtained and is neither written nor compared: a resumed run ends with equal results.
    """

    metrics: Numbers
    stderr: Errors
    starts: Numbers | None = None
    ties: int | None = None
    reused: int = Field(default=0, exclude=True)

    def __eq__(self, other: object) -> bool:
        """Compare everything but ``reused``."""
        return isinstance(other, type(self)) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # the metrics are dictionaries


class TaskResult(Task, Score):
    """The scores of one model on one task, and what decides them."""

    task: str

    @property
    def shared(self) -> Task:
        """What it shares with the scores of other models."""
        return Task(**{name: getattr(self, name) for name in Task.model_fields})


def task_results(tasks: Mapping[str, Task], scores: Mapping[str, Score]) -> dict[str, TaskResult]:
    """Return scores with what they share with other models, without those on other tasks."""
    return {
        name: TaskResult(task=name, **dict(tasks[name]), **{key: getattr(score, key) for key in Score.model_fields})
        for name, score in scores.items()
        if name in tasks
    }


class GroupResult(Part):
    """The score of one model on a group of tasks, as lm-eval aggregates those of the tasks.

    Attributes:
        group: the group's name.
        tasks: the names of the tasks and groups in it.
        n: documents of all tasks.
        metrics: each aggregated metric's value.
        stderr: its standard error, from those of the tasks, which are taken as independent.
        version: the version of the group's definition.
    """

    group: str
    tasks: list[str]
    n: int
    metrics: Numbers
    stderr: Errors = Field(default_factory=dict)
    version: str = "N/A"


class Comparison(Part):
    """The difference of a method from a reference on one task by one metric, in the metric's own unit.

    It has no verdict: those of the metrics that decide are :class:`hfpatch.results.verdicts.Verdict`.

    Attributes:
        reference: the method that it is compared with.
        metric: the task's primary metric, or a low-noise one.
        clusters: the groups that they come in; None where they are taken as independent.
        seeds: seeds of the method.
        difference: method minus reference; for a perplexity ``reference · (exp(mean log ratio) - 1)``.
        low: lower end of the 95 % interval of this difference alone; -inf where there are too few documents for one.
        high: upper end of that interval; inf where there are too few documents.
        p: two-sided p-value of no difference, by ``test``; below 0.05 where the interval leaves out 0.
        test: the name of the test.
        errors: the standard error and the degrees of freedom of each source of variation, documents and seeds; of a
            perplexity those of the mean log ratio.
        reference_score: the reference's score, mean over seeds; None of metrics that are no mean or ratio.
        log_ratio: True where ``errors`` are those of the mean log ratio, as of a perplexity; else None.
    """

    method: str
    reference: str
    task: str
    metric: str
    n: int
    clusters: Clusters | None = None
    seeds: int
    difference: Number
    low: Low = -math.inf
    high: High = math.inf
    p: float | None = None
    test: str
    errors: list[tuple[Annotated[float, Field(ge=0)], float]] = Field(default_factory=list)
    reference_score: Measured = None
    log_ratio: bool | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """The method and the reference."""
        return self.method, self.reference

    @property
    def units(self) -> int:
        """How many independent units there are: documents, or groups of them."""
        return self.n if self.clusters is None else self.clusters.groups

    @property
    def unit(self) -> float:
        """Units of the metric in one unit of its errors; those of a perplexity are errors of its logarithm.

        The upper end of its interval is ``unit · (exp(reach) - 1)`` above the difference.
        """
        if not self.log_ratio or not self.errors or not math.isfinite(self.high):
            return 1.0
        grown = math.expm1(float(reach(self.errors, ALPHA)))
        return (self.high - self.difference) / grown if grown > 0 else 1.0

    @property
    def design(self) -> Design:
        """Its errors, in the unit of its metric."""
        return Design.of((error * self.unit, freedom) for error, freedom in self.errors)
