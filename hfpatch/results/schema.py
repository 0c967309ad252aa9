"""The layout of ``results.json``, version :data:`SCHEMA`: of a comparison, a pretraining study and an evaluation.

``runs/`` builds these models and writes them, ``reporting/`` and users read them with :func:`hfpatch.load_results`.
Nothing here imports torch. A number that is not finite is null in the file. :func:`json_schema` is the same layout for
other tools.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, model_validator

SCHEMA: Literal[2] = 2
"""The version of the layout; a file of another one is refused."""

Verdict = Literal["better", "worse", "within noise", "too few documents"]
Values = dict[str, Any]
"""Settings, versions and the like, as they stand in recipes and libraries."""


def _numbers(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if isinstance(item, int | float) and not isinstance(item, bool)}


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


Numbers = Annotated[dict[str, float], BeforeValidator(_numbers)]
"""Names and numbers; what is not a number is left out (lm-eval writes "N/A" for a standard error that is not known)."""
Low = Annotated[
    float, BeforeValidator(lambda end: -math.inf if end is None else end), PlainSerializer(_or_null, float | None)
]
High = Annotated[
    float, BeforeValidator(lambda end: math.inf if end is None else end), PlainSerializer(_or_null, float | None)
]
"""The ends of an interval; null in the file where it is unbounded, as with too few documents."""
Number = Annotated[
    float, BeforeValidator(lambda value: math.nan if value is None else value), PlainSerializer(_or_null, float | None)
]
"""A measured value, NaN where it was not finite."""
Count = Annotated[int, Field(gt=0)]


class Part(BaseModel):
    """A part of the results; keys of a later minor addition are ignored, so that older versions can read the rest."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        return self.model_dump(mode="json")


class TrainOutcome(Part):
    """What one training took; see :class:`hfpatch.training.records.TrainResult` for the fields."""

    steps: int
    final_loss: Number
    tokens: int
    wall_s: float
    tokens_per_s: float
    peak_memory_bytes: float
    update_survival: Numbers = Field(default_factory=dict)
    final_eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None
    skipped_steps: int = 0
    stopped_early: bool = False
    diverged_step: int | None = None
    mfu: float | None = None
    matmul: str | None = None


class TaskResult(Part):
    """The scores of one model on one task.

    Attributes:
        task: the task's name.
        n: documents scored.
        metrics: each metric's value, as lm-eval defines it.
        stderr: the standard error over documents of each metric that has one.
        primary: the metric that stands for the task in comparisons.
        higher_is_better: the direction of the primary metric.
        num_fewshot: examples before each question.
        data_sha256: hash of the scored documents, in order.
        version: the task definition's version.
        reused: requests whose answers were kept from an earlier evaluation and not scored again. It says how the result
            was obtained and is neither written nor compared: a resumed run ends with equal results.
    """

    task: str
    n: int
    metrics: Numbers
    stderr: Numbers
    primary: str
    higher_is_better: bool
    num_fewshot: int
    data_sha256: str
    version: str
    reused: int = Field(default=0, exclude=True)

    def __eq__(self, other: object) -> bool:
        """Compare everything but ``reused``."""
        return isinstance(other, TaskResult) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # the metrics are dictionaries


class Comparison(Part):
    """The difference of a method from a reference on one task, all numbers in the metric's own unit.

    Attributes:
        method: the method.
        reference: what it is compared with.
        task: the task.
        metric: the task's primary metric.
        n: documents.
        seeds: seeds of the method.
        difference: method minus reference; for a perplexity ``reference · (exp(mean log ratio) - 1)``.
        low: lower end of the 95 % interval; -inf where there are too few documents for one.
        high: upper end of that interval; inf likewise.
        p: two-sided p-value of no difference, by ``test``; below 0.05 where the interval leaves out 0.
        p_holm: ``p`` corrected by Holm's method, over all methods and tasks compared with the baseline, or over all
            that are compared with other methods.
        test: the name of the test.
        smallest_visible: the true difference that had a chance of about 80 % to be found at 5 % with this sample,
            before correction; None where there is none.
        verdict: whether the difference is significant after correction, and which way it goes.
    """

    method: str
    reference: str
    task: str
    metric: str
    n: int
    seeds: int
    difference: Number
    low: Low = -math.inf
    high: High = math.inf
    p: float | None = None
    p_holm: float | None = None
    test: str
    smallest_visible: float | None = None
    verdict: Verdict

    @property
    def falls_to_correction(self) -> bool:
        """Whether the test alone finds a difference at 5 %, which is not significant after Holm's correction."""
        return self.verdict == "within noise" and self.p is not None and self.p < 0.05


class Curve(Part):
    """A method's training loss, the mean over its seeds; each seed's own is in its ``metrics.jsonl``.

    Attributes:
        steps: optimiser steps that every seed has, ascending; thinned out where a run has very many.
        loss: the mean loss at each of them, nats per predicted token.
        seeds: how many seeds there are.
        held_out: the mean loss on held-out text, by the steps after which every seed measured it.
    """

    steps: list[int]
    loss: list[Number]
    seeds: int
    held_out: dict[int, float] = Field(default_factory=dict)


class LayerSeries(Part):
    """One quantity of one method, layer by layer, the mean over seeds.

    Attributes:
        quantity: what it is.
        group: what distinguishes several series of one quantity (an adapter, a target), or nothing.
        points: layer -> value.
        reference: a value to compare them with, such as that at the paper's init.
    """

    quantity: str
    group: str = ""
    points: dict[int, float]
    reference: float | None = None


class Run(Part):
    """One method with one seed; ``train`` is None where nothing is trained."""

    commit: str | None = None
    train: TrainOutcome | None = None
    evaluation: dict[str, TaskResult] = Field(default_factory=dict)

    @property
    def diverged_step(self) -> int | None:
        """The step at which the run diverged, or None."""
        return None if self.train is None else self.train.diverged_step


class Parameters(Part):
    """Parameter counts: trained by the method, added to the base, and of the base itself."""

    trainable: int
    added: int
    base: int


class Match(Part):
    """The LoRA rank solved for another method's parameter count; ``difference`` is relative."""

    to: str
    rank: int
    parameters: int
    target_parameters: int
    difference: float | None = None


class Method(Part):
    """One method: its parts, what it trains, its runs by seed, and over seeds its loss curve and layers."""

    parts: list[Values] = Field(default_factory=list)
    parameters: Parameters
    match: Match | None = None
    form: str | None = None
    runs: dict[int, Run] = Field(default_factory=dict)
    curve: Curve | None = None
    layers: list[LayerSeries] = Field(default_factory=list)

    @property
    def trainable(self) -> int:
        """How many parameters it trains."""
        return self.parameters.trainable

    @property
    def diverged(self) -> dict[int, int]:
        """The seeds that diverged and the step of each."""
        steps = {seed: run.diverged_step for seed, run in sorted(self.runs.items())}
        return {seed: step for seed, step in steps.items() if step is not None}


class Task(Part):
    """What a task measures."""

    primary: str
    higher_is_better: bool
    n: int
    data_sha256: str | None = None
    version: str | int | float | None = None


class ComparisonResults(Part):
    """What ``hfpatch compare`` wrote.

    Attributes:
        schema_version: :data:`SCHEMA`, as ``schema`` in the file.
        kind: what sort of results these are.
        name: the recipe's name; likewise ``description`` and ``protocol``.
        complete: whether every run of the recipe is there.
        provenance: commit, versions, device, times.
        model: the base: name, revision, hash, dtype, type and size.
        data: the training text and its blocks.
        plan: the batch plan of each seed: hash, steps, batch size.
        training: the recipe's section; likewise ``evaluation``.
        tasks: what each task measures.
        methods: each method with its runs.
        comparisons: the paired differences; empty until the comparison is complete.
        correction: what Holm's correction goes over.
        warnings: what a reader must know before believing a number.
    """

    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    kind: Literal["comparison"] = "comparison"
    name: str
    description: str = ""
    protocol: str = "custom"
    complete: bool = False
    provenance: Values = Field(default_factory=dict)
    model: Values = Field(default_factory=dict)
    data: Values = Field(default_factory=dict)
    plan: dict[str, Values] = Field(default_factory=dict)
    training: Values = Field(default_factory=dict)
    evaluation: Values = Field(default_factory=dict)
    tasks: dict[str, Task] = Field(default_factory=dict)
    methods: dict[str, Method] = Field(default_factory=dict)
    comparisons: list[Comparison] = Field(default_factory=list)
    correction: str = "methods and tasks"
    warnings: list[str] = Field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the results as ``results.json`` has them."""
        return self.model_dump(mode="json", by_alias=True)

    @property
    def baseline(self) -> str | None:
        """The method that adds nothing: what the others are compared with."""
        if "baseline" in self.methods and not self.methods["baseline"].parts:
            return "baseline"
        return next((name for name, method in self.methods.items() if not method.parts), None)

    @property
    def others(self) -> list[str]:
        """The methods beside the baseline."""
        return [name for name in self.methods if name != self.baseline]

    @property
    def seeds(self) -> list[int]:
        """The seeds that the recipe asked for and those that there are."""
        trained = (method for method in self.methods.values() if method.parts)  # the base alone has no seed
        return sorted({*self.training.get("seeds", ()), *(seed for method in trained for seed in method.runs)})

    def values(self, method: str, task: str, metric: str | None = None) -> list[float]:
        """Return a metric (the task's primary one if None) of every seed of a method, in the order of seeds."""
        name = metric or self.tasks[task].primary
        runs = self.methods[method].runs if method in self.methods else {}
        outcomes = (runs[seed].evaluation.get(task) for seed in sorted(runs))
        return [outcome.metrics[name] for outcome in outcomes if outcome is not None and name in outcome.metrics]

    def mean(self, method: str, task: str) -> float | None:
        """Return the mean over seeds of the task's primary metric, or None where there is no value."""
        values = self.values(method, task)
        return sum(values) / len(values) if values else None

    def comparison(self, method: str, task: str, reference: str | None) -> Comparison | None:
        """Return the comparison of ``method`` with ``reference`` on ``task``'s primary metric, if it was made."""
        return self._index.get((method, reference, task, self.tasks[task].primary))

    @cached_property
    def _index(self) -> dict[tuple[str, str | None, str, str], Comparison]:
        return {(c.method, c.reference, c.task, c.metric): c for c in reversed(self.comparisons)}


Point = Values
"""A point of a sweep: dotted key -> value; empty without a sweep."""
AtStep = tuple[int, float | None, float | None, float | None]
ByStep = list[AtStep]
"""A statistic by step: step, mean, low, high."""


class VariantParameters(Part):
    """How many parameters a variant trains; the embeddings and what is tied to them left out of the second."""

    total: Count
    non_embedding: Count


class Variant(Part):
    """One configuration: its query path in a line of maths, its architecture, and what it trains differently."""

    query: str = ""
    description: str = ""
    architecture: Values = Field(default_factory=dict)
    training: Values = Field(default_factory=dict)
    parameters: VariantParameters


class Loss(Part):
    """The validation loss at the end, nats per token: mean and standard deviation over seeds, and each seed's."""

    mean: float
    sd: float | None = None
    values: dict[int, float] = Field(default_factory=dict)


class Improvement(Part):
    """The share of the baseline's loss by which a variant's is lower, paired by seed, with its 95 % interval."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None


class Row(Part):
    """One variant at one point of the sweep.

    Attributes:
        variant: the variant's name.
        point: the point of the sweep.
        best: whether it is the variant's point of lowest mean loss.
        loss: the loss at the end; None where no seed has one.
        diverged: seed -> step at which it diverged.
        missing: the seeds that have not run.
        improvement: against the baseline's best point; None where there is nothing to compare.
        curve: validation loss by step; low and high are the smallest and largest seed.
        improvement_by_step: the improvement at each evaluation.
        seconds_per_step: duration of an optimiser step, the median.
    """

    variant: str
    point: Point = Field(default_factory=dict)
    best: bool = False
    loss: Loss | None = None
    diverged: dict[int, int] = Field(default_factory=dict)
    missing: list[int] = Field(default_factory=list)
    improvement: Improvement | None = None
    curve: ByStep = Field(default_factory=list)
    improvement_by_step: ByStep = Field(default_factory=list)
    seconds_per_step: float | None = None


class Diagnostic(Part):
    """What f does in one layer after a step: mean over tokens of ‖f(x)‖/‖A(x)‖ and of cos(f(x), A(x))."""

    step: int
    layer: int
    target: str = "query"
    size: float | None = None
    cosine: float | None = None


class StudyRun(Part):
    """One variant at one point with one seed; ``evaluation`` has the loss after each step that measured it."""

    variant: str
    point: Point = Field(default_factory=dict)
    seed: int
    outcome: Literal["complete", "diverged"]
    diverged_step: int | None = None
    commit: str | None = None
    seconds_per_step: float | None = None
    train: TrainOutcome | None = None
    evaluation: list[tuple[int, float | None]] = Field(default_factory=list)
    diagnostics: list[Diagnostic] = Field(default_factory=list)


class StudyResults(Part):
    """What ``hfpatch pretrain`` wrote of a study; rows and runs are in the order of the recipe."""

    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    kind: Literal["pretraining"] = "pretraining"
    complete: bool
    name: str = ""
    description: str = ""
    provenance: Values = Field(default_factory=dict)
    data: Values = Field(default_factory=dict)
    evaluation_data: Values | None = None
    tokenizer: Values = Field(default_factory=dict)
    plans: Values = Field(default_factory=dict)
    training: Values = Field(default_factory=dict)
    seeds: list[int]
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    baseline: str
    variants: Annotated[dict[str, Variant], Field(min_length=1)]
    rows: list[Row] = Field(default_factory=list)
    runs: list[StudyRun] = Field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the results as ``results.json`` has them."""
        return self.model_dump(mode="json", by_alias=True)

    @model_validator(mode="after")
    def _names_are_known(self) -> StudyResults:
        if self.baseline not in self.variants:
            raise ValueError(f"baseline is {self.baseline!r}, which is not among variants")
        for kind, named in (("rows", self.rows), ("runs", self.runs)):
            unknown = next((each.variant for each in named if each.variant not in self.variants), None)
            if unknown is not None:
                raise ValueError(f"{kind} names {unknown!r}, which is not among variants")
        return self

    @property
    def others(self) -> list[str]:
        """The variants that are compared with the baseline."""
        return [name for name in self.variants if name != self.baseline]

    @cached_property
    def chosen(self) -> dict[str, Row]:
        """The row that represents each variant: its best point, or while there is none, its lowest so far.

        The lowest is taken among the rows with the most seeds; without any loss it is the first.
        """
        found: dict[str, Row] = {}
        for row in self.rows:
            known = found.get(row.variant)
            if known is None or (row.best and not known.best) or (not known.best and _rank(row) < _rank(known)):
                found[row.variant] = row
        return {name: found[name] for name in self.variants if name in found}

    @property
    def common_architecture(self) -> Values:
        """What all architectures share; all of it where there is one variant."""
        first, *others = (variant.architecture for variant in self.variants.values())
        return {
            key: value for key, value in first.items() if all(key in other and other[key] == value for other in others)
        }

    def runs_of(self, row: Row) -> list[StudyRun]:
        """The runs behind a row, by seed."""
        runs = [run for run in self.runs if run.variant == row.variant and run.point == row.point]
        return sorted(runs, key=lambda run: run.seed)

    def seed_values(self, row: Row) -> dict[int, float]:
        """Return the improvement of each seed: (L_base - L) / L_base, both at the end and with the same seed."""
        base = self.chosen.get(self.baseline)
        if base is None or base.loss is None or row.loss is None:
            return {}
        shared = sorted(base.loss.values.keys() & row.loss.values.keys())
        known = {seed: (base.loss.values[seed], row.loss.values[seed]) for seed in shared}
        return {seed: (there - here) / there for seed, (there, here) in known.items() if there}


def _rank(row: Row) -> tuple[bool, int, float]:
    """Rows with a loss first, of those the one with the most seeds, then the lowest loss."""
    return row.loss is None, len(row.missing) + len(row.diverged), math.inf if row.loss is None else row.loss.mean


class EvaluatedVariant(Part):
    """The base, or the base with a patch.

    Attributes:
        patch: the patch's folder; None is the bare base.
        added: parameters that the patch added.
        scores: the result of each task.
    """

    patch: str | None = None
    added: int = 0
    scores: dict[str, TaskResult]


class EvaluationResults(Part):
    """What ``hfpatch eval`` found.

    Attributes:
        schema_version: :data:`SCHEMA`, as ``schema`` in the file.
        kind: what sort of results these are.
        model: the base: name, revision, hash, dtype.
        settings: the tasks and how they were run.
        variants: what was evaluated, by label; the bare base is ``base``.
        comparisons: each patch compared with the base, where the base was evaluated too.
        warnings: what a reader must know before believing the scores.
        provenance: where the numbers come from.
    """

    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    kind: Literal["evaluation"] = "evaluation"
    model: Values
    settings: Values
    variants: dict[str, EvaluatedVariant]
    comparisons: list[Comparison] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    provenance: Values = Field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the results as ``results.json`` has them."""
        return self.model_dump(mode="json", by_alias=True)


Results = ComparisonResults | StudyResults | EvaluationResults
"""Any ``results.json``; ``kind`` says which."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of ``results.json``."""
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Results, Field(discriminator="kind")])
    return adapter.json_schema(by_alias=True, mode="serialization")
