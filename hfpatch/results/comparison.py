"""The results of ``hfpatch compare``."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from statistics import fmean, median
from typing import Any, Literal

from pydantic import Field, computed_field, model_validator

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.budgets import family_of
from hfpatch.recipes.pairs import Question, by_question, is_lora
from hfpatch.results.decision import rate_error
from hfpatch.results.frontier import Frontier
from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.parts import (
    HELD_OUT,
    NATS_PER_TOKEN,
    SCHEMA,
    Comparison,
    Measured,
    Number,
    Part,
    Score,
    Task,
    TaskResult,
    TrainResult,
    Values,
    task_results,
    with_names,
)
from hfpatch.results.retention import RETENTION, KeptAnswers, Retention, Rewound
from hfpatch.results.tables import COST, Record, Tabular, pair_records, score_records
from hfpatch.results.verdicts import (
    Look,
    LookTaken,
    Measure,
    PrimaryQuestion,
    Verdict,
    deciding,
    judge,
    judge_primary,
    with_rates,
)

_OF_TEXT = Measure(BITS_PER_BYTE, RETENTION[BITS_PER_BYTE])  # decides a text that should be kept
MATCHED = 0.01
"""Share by which two parameter counts may differ and still count as matched, where no size was solved for."""


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
        quantity: the name of the quantity.
        group: what distinguishes several series of one quantity (an adapter, a target), or nothing.
        points: layer -> value.
        reference: a value to compare them with, such as that at the paper's init.
    """

    quantity: str
    group: str = ""
    points: dict[int, float]
    reference: float | None = None


class Run(Part):
    """One method with one seed; ``train`` is None where nothing is trained.

    ``computed_with`` is what its scores were computed with, see :data:`hfpatch.results.identity.COMPUTED_WITH`;
    ``retention`` has the scores on text that should be kept, ``rewound`` those at other scales of its patch.
    """

    computed_with: Values | None = None
    commit: str | None = None
    train: TrainResult | None = None
    evaluation: dict[str, Score] = Field(default_factory=dict)
    retention: dict[str, Score] | None = None
    rewound: dict[str, Rewound] | None = None

    @property
    def diverged_step(self) -> int | None:
        """The step at which the run diverged, or None."""
        return None if self.train is None else self.train.diverged_step


class Parameters(Part):
    """Parameter counts: trained by the method, added to the base, and of the base itself.

    Of a model from scratch all are trained and added to nothing; ``non_embedding`` counts those outside of the
    embeddings of tokens and positions and a head.
    """

    trainable: int
    added: int
    base: int
    non_embedding: int | None = None


class Diagnostic(Part):
    """What f does in one layer after a step: mean over seeds and tokens.

    Attributes:
        step: optimiser steps done.
        layer: index of the block.
        target: ``query``, ``key`` or ``value``.
        size: ‖f(x)‖/‖A(x)‖, A what f is added to.
        cosine: that between f(x) and A(x).
        size_beside_x: ‖f(x)‖/‖x‖.
    """

    step: int
    layer: int
    target: str = "query"
    size: float | None = None
    cosine: float | None = None
    size_beside_x: float | None = None


class Variant(Part):
    """One variant of a study of models from scratch.

    Attributes:
        description: a sentence.
        query: its query path in a line of maths.
        architecture: its whole architecture, as in a recipe.
        training: its own settings of training, beside those of all variants and the chosen values.
        diagnostics: f of its query paths by step, over the seeds that came to the end; empty without an f.
    """

    description: str = ""
    query: str = ""
    architecture: Values = Field(default_factory=dict)
    training: Values = Field(default_factory=dict)
    diagnostics: list[Diagnostic] = Field(default_factory=list)


class _Matched(Part):
    """How near a part's parameter count is to that of another method; ``difference`` is relative."""

    to: str
    parameters: int
    target_parameters: int
    difference: float | None = None


class Match(_Matched):
    """The rank solved for another method's parameter count."""

    rank: int

    @property
    def words(self) -> str:
        """The size in words: ``rank 320``."""
        return f"rank {self.rank}"


class SizeMatch(_Matched):
    """A size other than a rank, solved for another method's parameter count: the option and its value."""

    size: str
    value: int | float

    @property
    def words(self) -> str:
        """The size in words: ``block size 64``."""
        return f"{self.size.replace('_', ' ')} {self.value:g}"


class Cost(Part):
    """What a training step of a method costs, measured beside the other methods.

    Attributes:
        steps_s: seconds of a step in each round; a round has one step of every method, on the same batch.
        memory_bytes: the peak memory of a step, the median over rounds; on a CPU the process's resident memory, None
            where the system cannot reset that measurement.
        share: the share of a step's blocks that were run; ``steps_s`` are those of a whole step, in proportion.
        shared: whether other programs used the machine meanwhile; None where that is not known.
    """

    steps_s: list[float]
    memory_bytes: int | None = None
    share: float = 1.0
    shared: bool | None = None

    def steps_over(self, other: Cost) -> float:
        """Return the time of a step over that of another method: the median over rounds of the ratio in each."""
        return median(ours / theirs for ours, theirs in zip(self.steps_s, other.steps_s, strict=True))

    def memory_over(self, other: Cost) -> float | None:
        """Return the peak memory over that of another method; None where one is not known."""
        return self.memory_bytes / other.memory_bytes if self.memory_bytes and other.memory_bytes else None


class Method(Part):
    """One method: its parts, its parameters, its runs by seed, and over seeds its loss curve and layers.

    ``label`` is what reports call it; None is the name under which the results have it. ``cost`` is that of a training
    step, where it was measured; ``merges`` whether the method can be merged into the base's weights, where known;
    ``variant`` says what a model from scratch is, which has no parts.
    """

    label: str | None = None
    parts: list[Values] = Field(default_factory=list)
    parameters: Parameters
    match: Match | SizeMatch | None = None
    form: str | None = None
    runs: dict[int, Run] = Field(default_factory=dict)
    curve: Curve | None = None
    layers: list[LayerSeries] = Field(default_factory=list)
    cost: Cost | None = None
    merges: bool | None = None
    variant: Variant | None = None

    @property
    def trainable(self) -> int:
        """How many parameters it trains."""
        return self.parameters.trainable

    @property
    def compared_size(self) -> int:
        """The parameters that its size is told by: those it trains, of a model from scratch without embeddings."""
        return self.parameters.non_embedding or self.parameters.trainable

    @property
    def diverged(self) -> dict[int, int]:
        """The seeds that diverged and the step of each."""
        steps = {seed: run.diverged_step for seed, run in sorted(self.runs.items())}
        return {seed: step for seed, step in steps.items() if step is not None}

    @property
    def all_diverged(self) -> bool:
        """Whether it has runs, all of which diverged."""
        return 0 < len(self.runs) == len(self.diverged)


class Trial(Part):
    """One method trained at one learning rate with the seed of tuning.

    Attributes:
        method: the method.
        seed: the seed, the same for all trials and of no final run.
        values: ``lr``, and other values of the grid.
        loss: nats per token on the text of tuning after the last step; None where the trial diverged, which counts as
            infinite.
        diverged_step: the step at which it diverged, or None.
        plan: SHA-256 of its batch plan, the same for all trials.
        commit: the commit of hfpatch that made it.
    """

    method: str
    seed: int
    values: Values
    loss: Measured = None
    diverged_step: int | None = None
    plan: str | None = None
    commit: str | None = None

    @property
    def rate(self) -> float | None:
        """The learning rate, or None if it is no number."""
        return _rate(self.values)


class Choice(Part):
    """The values that a method's final runs are trained with.

    Attributes:
        values: those of its trial of the lowest loss.
        loss: that loss; None where all its trials diverged, so that the method is not tuned.
        trials: how many trials it had.
        edge: whether the rate is the lowest or the highest that was tried, so that a better one may lie beyond; None
            where all diverged.
        at: the method whose trials these are, where it is another budget of it; None is its own.
    """

    values: Values
    loss: Measured = None
    trials: int
    edge: Literal["lowest", "highest"] | None = None
    at: str | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether a trial came to its end, so that there is a best one."""
        return self.loss is not None

    @property
    def rate(self) -> float | None:
        """The learning rate, or None if it is no number."""
        return _rate(self.values)


def _rate(values: Values) -> float | None:
    rate = values.get("lr")
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


class Tuning(Part):
    """The trials of a comparison.

    Attributes:
        seed: the seed of all trials.
        steps: optimiser steps of each.
        learning_rates: the rates that every method was tried at, ascending.
        added: those of them that the recipe does not list: beyond an edge that was some method's best.
        refined: those of them that lie between others, of which each method was tried at those beside its best.
        text: the text whose loss decides: documents, tokens, predicted tokens and their bytes, hash.
        trials: every trial that is complete.
        chosen: the values of each method's final runs.
        base_loss: the untrained base's loss on the text, nats per token; None where it was not measured.
    """

    seed: int
    steps: int
    learning_rates: list[float] = Field(default_factory=list)
    added: list[float] = Field(default_factory=list)
    refined: list[float] | None = None
    text: Values = Field(default_factory=dict)
    trials: list[Trial] = Field(default_factory=list)
    chosen: dict[str, Choice] = Field(default_factory=dict)
    base_loss: Measured = None

    def rate_error(self, method: str, otherwise: float | None = None) -> float | None:
        """Return what the choice of a method's rate may be worth, in nats per token; None where it was not tuned.

        It is that of :func:`hfpatch.results.decision.rate_error` over the trials that differ in the rate alone, capped
        at the base's loss on tuning's text, or ``otherwise`` on another text where that was not measured.
        """
        choice = self.chosen.get(method)
        if choice is None or not choice.is_tuned:
            return None
        best, losses = choice.rate, dict[float, float]()
        for trial in self.of(choice.at or method):
            if trial.rate is not None and {**trial.values, "lr": best} == choice.values:
                losses[trial.rate] = math.inf if trial.loss is None else trial.loss
        if best is None or best not in losses:
            return None
        caps = (cap for cap in (self.base_loss, otherwise) if cap is not None)
        return rate_error(losses, best, next(caps, math.inf))

    @property
    def bits_per_nat(self) -> float | None:
        """What a nat per token of the text is in bits per byte; None where its bytes are not known."""
        size = self.text.get("bytes")
        return self.text["predicted_tokens"] / (size * math.log(2)) if size else None

    def of(self, method: str) -> list[Trial]:
        """Return the trials of a method."""
        return [trial for trial in self.trials if trial.method == method]

    def rates_of(self, method: str) -> list[float]:
        """Return the learning rates that a method was tried at, ascending; without its trials those of all."""
        rates = {trial.rate for trial in self.of(method) if trial.rate is not None}
        return sorted(rates) or self.learning_rates

    def is_chosen(self, trial: Trial) -> bool:
        """Whether a trial is its method's best, at whose values the final runs are trained."""
        choice = self.chosen.get(trial.method)
        return choice is not None and choice.is_tuned and choice.values == trial.values


class Study(Part):
    """What a study of models from scratch has in place of a base.

    Attributes:
        baseline: the variant that the others are compared with, itself trained with every seed.
        architecture: what all variants share of it.
        tokenizer: its size and hash.
    """

    baseline: str
    architecture: Values = Field(default_factory=dict)
    tokenizer: Values = Field(default_factory=dict)


class ComparisonResults(Tabular):
    """The results of ``hfpatch compare``, or of a study of ``hfpatch pretrain``, whose methods are its variants.

    Attributes:
        schema_version: :data:`SCHEMA`, as ``schema`` in the file.
        kind: what sort of results these are.
        name, description, protocol: those of the recipe.
        complete: whether every run of the recipe is there.
        provenance: commit, versions, device, times.
        model: the base: name, revision, hash, dtype, type and size; nothing in a study.
        study: the baseline and what all variants share, where the models are trained from scratch; else None.
        data: the training text and its blocks.
        plan: the batch plan of each seed: hash, steps, batch size.
        training, evaluation: the recipe's sections, without the rate where it was tuned.
        tuning: the trials of every method and the chosen values; None where nothing was tuned.
        tasks: what the scores of all runs on each task share: its metric, documents and prompts.
        methods: each method with its runs.
        questions: the primary questions, as the recipe declares them before anything has run.
        margin: the largest difference that does not matter, by task and measure.
        pairs: all pairs that are compared, by secondary question.
        comparisons: the paired differences by every measure; empty until the comparison is complete.
        verdicts: the verdict of each pair on each task and text, by the measure that decides it: primary ones first.
        retention: the changes on text that training should not change; None where the recipe names none.
        kept: the right answers that each method kept and won; None before the comparison is complete.
        warnings: the cautions.
        left_out: methods of the recipe that reach no size near their budget, with the reason; None without any.
        frontier: the methods by budget, where the recipe has budgets and is complete.
        looks: what was found with growing numbers of seeds, where the recipe has ``training.seeds.looks``. A primary
            pair's verdict is that of the look that decided it; plain intervals are not corrected for looks.
        runs_saved: the trainings that looks made unnecessary, of complete results.
        joined: the verdicts of whole runs, where a report joins several runs, or has some methods or other names.
    """

    tables = ("scores", "methods", "verdicts", "comparisons", "curves", "layers", "trials", "retention")

    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    kind: Literal["comparison"] = "comparison"
    name: str
    description: str = ""
    protocol: str = "custom"
    complete: bool = False
    provenance: Values = Field(default_factory=dict)
    model: Values = Field(default_factory=dict)
    study: Study | None = None
    data: Values = Field(default_factory=dict)
    plan: dict[str, Values] = Field(default_factory=dict)
    training: Values = Field(default_factory=dict)
    tuning: Tuning | None = None
    evaluation: Values = Field(default_factory=dict)
    tasks: dict[str, Task] = Field(default_factory=dict)
    methods: dict[str, Method] = Field(default_factory=dict)
    questions: list[PrimaryQuestion] = Field(default_factory=list)
    margin: dict[str, float] = Field(default_factory=dict)
    pairs: dict[Question, list[tuple[str, str]]] = Field(default_factory=dict)
    comparisons: list[Comparison] = Field(default_factory=list)
    retention: Retention | None = None
    kept: list[KeptAnswers] | None = None
    warnings: list[str] = Field(default_factory=list)
    left_out: dict[str, str] | None = None
    frontier: Frontier | None = None
    looks: list[LookTaken] | None = None
    runs_saved: int | None = None
    joined: list[Verdict] | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _baseline_is_known(self) -> ComparisonResults:
        if self.study is not None and self.study.baseline not in self.methods:
            raise ValueError(f"study.baseline: {self.study.baseline!r} is none of the methods")
        return self

    @computed_field  # type: ignore[prop-decorator]  # pydantic stacks it on properties
    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict of each pair on each task and text: the one list that every report reads, primary ones first."""
        if self.joined is not None:
            return self.joined
        changes = self.retention.changes if self.retention is not None else []
        texts = dict.fromkeys(self.retention.texts if self.retention is not None else (), _OF_TEXT)

        made = list[Verdict]()
        looks, measures = [Look([*self.comparisons, *changes])], self.deciding | texts
        if self.looks:
            looks = [Look(each.comparisons, each.part) for each in self.looks]
        diverged = {name: method.diverged for name, method in self.methods.items()}
        for asked in self.questions:
            given: Values = {"why_not": self._why_not, "diverged": diverged}
            made += judge_primary(asked, looks, measures, self.margin, **given)
        primary = {(each.method, each.other, each.task) for each in made}
        made += judge(self.comparisons, self.pairs, self.deciding, self._why_not, without=primary)
        of_base = list(dict.fromkeys((each.method, each.reference) for each in changes))
        made += judge(changes, {"retention": of_base}, texts, without=primary)
        bits = None if self.tuning is None else self.tuning.bits_per_nat
        return [with_rates(each, self.rate_errors, bits) for each in made]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> ComparisonResults:
        """Return a copy, without the cached values of the original."""
        copy = super().model_copy(update=update, deep=deep)
        for computed in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[computed]
        return copy

    def only(self, methods: Collection[str]) -> ComparisonResults:
        """Return the results of some methods and the baseline, with the p-values and verdicts of the whole comparison.

        A warning says so.

        Raises:
            HfpatchError: if there is no such method, or none is named.
        """
        choices = f"; there are {', '.join(self.others)}"
        wrong = next((name for name in methods if name not in self.methods), None)
        if wrong is not None:
            raise HfpatchError(
                f"--methods: no method {wrong!r} in {self.name}{nearest(wrong, self.methods) or choices}"
            )
        if not methods:
            raise HfpatchError(f"--methods names no method of {self.name}{choices}")

        kept = {name: method for name, method in self.methods.items() if name in {self.baseline, *methods}}
        shown = len(kept) - (self.baseline in kept)
        note = (
            f"Shown are {shown} of {len(self.others)} methods: p-values and verdicts are those of the whole "
            "comparison, corrected over all its methods."
        )
        update: Values = {
            "methods": kept,
            "comparisons": [each for each in self.comparisons if each.method in kept and each.reference in kept],
            "joined": [each for each in self.verdicts if each.method in kept and each.other in kept],
            "kept": self.kept and [each for each in self.kept if each.method in kept],
            "warnings": [note, *self.warnings],
        }
        if self.tuning is not None:
            trials = [trial for trial in self.tuning.trials if trial.method in kept]
            chosen = {name: choice for name, choice in self.tuning.chosen.items() if name in kept}
            update["tuning"] = self.tuning.model_copy(update={"trials": trials, "chosen": chosen})
        if self.retention is not None:
            of_kept = [point for point in self.retention.points if point.method in kept]
            update["retention"] = self.retention.model_copy(update={"points": of_kept})
        if self.frontier is not None:
            lines = [
                line.model_copy(update={"points": [point for point in line.points if point in kept]})
                for line in self.frontier.lines
                if not kept.keys().isdisjoint(line.points)
            ]
            update["frontier"] = self.frontier.model_copy(update={"lines": lines})
        return self.model_copy(update=update)

    @property
    def labels(self) -> dict[str, str]:
        """What reports call each method: its label, or its name where it has none or another has the same label."""
        labels = [method.label for method in self.methods.values()]
        free = {label for label in labels if label and labels.count(label) == 1 and label not in self.methods}
        return {name: each.label if each.label in free else name for name, each in self.methods.items()}

    def labelled(self) -> ComparisonResults:
        """Return the results with every method under its label, for tables and figures."""
        names = self.labels
        if all(name == label for name, label in names.items()):
            return self
        families = {family_of(name): family_of(label) for name, label in names.items()}
        return self.renamed(families | names)

    def renamed(self, names: Mapping[str, str]) -> ComparisonResults:
        """Return the results with other names of methods, and the verdicts that these have."""
        results: ComparisonResults = with_names(self.model_copy(update={"joined": self.verdicts}), names)
        return results

    @property
    def first_task(self) -> str | None:
        """The task that methods are ordered by: the held-out text, else the first text, else the first task."""
        texts = [task for task, info in self.tasks.items() if info.is_text]
        return next(iter([*(task for task in texts if task == HELD_OUT), *texts, *self.tasks]), None)

    @property
    def baseline(self) -> str | None:
        """The method that adds nothing, or a study's baseline, with which the others are compared."""
        if self.study is not None:
            return self.study.baseline
        if "baseline" in self.methods and not self.methods["baseline"].parts:
            return "baseline"
        return next((name for name, method in self.methods.items() if not method.parts), None)

    @property
    def base(self) -> str | None:
        """The baseline where it is a bare base, which has no seed; None in a study, which trains it like the others."""
        return self.baseline if self.study is None else None

    @property
    def noun(self) -> str:
        """What a sentence calls a method: a variant in a study."""
        return "method" if self.study is None else "variant"

    def seeds_asked(self, method: str) -> list[int]:
        """Return the seeds that a method should have: all, or with looks the seeds that a look asked for."""
        if not self.looks:
            return self.seeds
        numbers = self.training["seeds"]["looks"]
        grown = [after for look, after in zip(self.looks, numbers[1:], strict=False) if method in look.growing]
        return list(range(max([numbers[0], *grown])))

    @property
    def others(self) -> list[str]:
        """The methods beside the baseline."""
        return [name for name in self.methods if name != self.baseline]

    @property
    def seeds(self) -> list[int]:
        """The seeds of the recipe and of its runs."""
        trained = (method for method in self.methods.values() if method.parts or self.study)  # a bare base has no seed
        asked = self.training.get("seeds")
        numbers = [seed for seed in asked if isinstance(seed, int)] if isinstance(asked, list) else []
        return sorted({*numbers, *(seed for method in trained for seed in method.runs)})

    def values(self, method: str, task: str, metric: str | None = None) -> list[float]:
        """Return a metric (the task's primary one if None) of every seed of a method, in the order of seeds."""
        return list(self.by_seed(method, task, metric).values())

    def by_seed(self, method: str, task: str, metric: str | None = None) -> dict[int, float]:
        """Return a metric (the task's primary one if None) of a method by seed, ascending."""
        name = metric or self.tasks[task].primary
        runs = self.methods[method].runs if method in self.methods else {}
        outcomes = {seed: runs[seed].evaluation.get(task) for seed in sorted(runs)}
        return {seed: one.metrics[name] for seed, one in outcomes.items() if one is not None and name in one.metrics}

    def mean(self, method: str, task: str, metric: str | None = None) -> float | None:
        """Return the mean over seeds of a metric (the task's primary one if None), or None where there is no value."""
        values = self.values(method, task, metric)
        return fmean(values) if values else None

    def scores_of(self, run: Run) -> dict[str, TaskResult]:
        """Return a run's scores with what those of all runs share."""
        return task_results(self.tasks, run.evaluation)

    def improvements(self, method: str) -> dict[int, float]:
        """Return the share of the baseline's held-out loss that a method saves, by step: (L_baseline - L)/L_baseline.

        L are means over seeds. It is shown, and not tested: verdicts are on differences in nats per token.
        """
        curves = [self.methods[name].curve for name in (method, self.baseline) if name in self.methods]
        ours, theirs = (curve.held_out if curve is not None else {} for curve in curves)
        return {step: (theirs[step] - loss) / theirs[step] for step, loss in ours.items() if theirs.get(step)}

    @property
    def base_loss(self) -> float | None:
        """The base's loss on the text that is held out of the training text, in nats per token, or None."""
        held_out = self.data.get("held_out")
        loss = held_out.get("base_loss") if isinstance(held_out, dict) else None
        return loss if isinstance(loss, int | float) else None

    def comparison(self, method: str, task: str, reference: str | None, metric: str) -> Comparison | None:
        """Return the paired difference by a metric, if it was made."""
        return self._index.get((method, reference, task, metric))

    def verdict(self, method: str, task: str, other: str | None) -> Verdict | None:
        """Return the verdict of a pair on a task; None where no question compares the pair."""
        return self._decided.get((method, other, task))

    def compared_in(self, asked: Collection[tuple[str, str, str]]) -> list[Comparison]:
        """Return the comparisons, of tasks and of texts that should be kept, of pairs ``(method, other, task)``."""
        changes = self.retention.changes if self.retention is not None else []
        made = [*self.comparisons, *changes]
        return [one for one in made if (one.method, one.reference, one.task) in asked]

    @property
    def rate_errors(self) -> dict[str, float | None]:
        """What the choice of each method's rate may be worth, in nats per token, see :meth:`Tuning.rate_error`."""
        tuning = self.tuning
        return {} if tuning is None else {name: tuning.rate_error(name, self.base_loss) for name in tuning.chosen}

    @property
    def primary(self) -> list[Verdict]:
        """The verdicts of the primary questions."""
        return [each for each in self.verdicts if each.role == "primary"]

    def answers(self, question: Question, method: str | None = None) -> list[Verdict]:
        """Return the verdicts on pairs of a kind, primary and secondary, of one method or of all.

        ``retention`` are those on texts that should be kept, all others those on tasks that the results have.
        """
        verdicts = []
        for each in self.verdicts:
            kind = each.question
            if each.role == "primary" and each.task not in self.tasks:
                kind = "retention"
            elif each.role == "primary":
                kind = next(iter(by_question([(each.method, each.other)], self.baseline, self._loras)))
            if kind == question and method in (None, each.method) and (kind == "retention" or each.task in self.tasks):
                verdicts.append(each)
        return verdicts

    @cached_property
    def deciding(self) -> dict[str, Measure]:
        """The measure that decides each task."""
        primary = {task: Measure(info.primary, info.higher_is_better) for task, info in self.tasks.items()}
        made = {(each.task, each.metric) for each in self.comparisons}
        runs = (run for method in self.methods.values() for run in method.runs.values())
        scored = ((task, metric) for run in runs for task, score in run.evaluation.items() for metric in score.metrics)
        return deciding(primary, made or scored)

    def records(self, table: str) -> Iterator[Record]:  # noqa: D102 - as in Tabular
        match table:
            case "scores":
                for name, method in self.methods.items():
                    for seed, run in sorted(method.runs.items()):
                        of_run = {"method": name, "seed": seed, "trainable": method.trainable}
                        scores = (row for score in self.scores_of(run).values() for row in score_records(score))
                        yield from (of_run | row for row in scores)
            case "methods":
                for name, method in self.methods.items():
                    trained = [run.train for run in method.runs.values() if run.train is not None]
                    yield {
                        "method": name,
                        **method.parameters.to_json(),
                        "form": method.form,
                        "matched_to": method.match.to if method.match is not None else None,
                        "seeds": len(method.runs),
                        "diverged": len(method.diverged),
                        "held_out_loss": self.mean(name, HELD_OUT, NATS_PER_TOKEN),
                        **{key: fmean(getattr(train, key) for train in trained) if trained else None for key in COST},
                    }
            case "verdicts" | "comparisons":
                yield from pair_records(self.verdicts if table == "verdicts" else self.comparisons)
            case "curves":
                for name, method in self.methods.items():
                    if (curve := method.curve) is not None:
                        for step, loss in zip(curve.steps, curve.loss, strict=True):
                            yield {"method": name, "step": step, "loss": loss, "held_out": curve.held_out.get(step)}
            case "layers":
                for name, method in self.methods.items():
                    for series in method.layers:
                        of_series = {"method": name, "quantity": series.quantity, "group": series.group}
                        for layer, value in sorted(series.points.items()):
                            yield {**of_series, "layer": layer, "value": value}
            case "trials" if (tuning := self.tuning) is not None:
                for trial in tuning.trials:
                    row = {"method": trial.method, **trial.values, "loss": trial.loss}
                    yield {**row, "diverged_step": trial.diverged_step, "chosen": tuning.is_chosen(trial)}
            case "retention" if (retention := self.retention) is not None:
                for point in retention.points:
                    of_point = {"method": point.method, "scale": point.scale, "tuning_loss": point.tuning_loss}
                    of_point["chosen"] = retention.chosen(point.method) == point.scale
                    yield from ({**row, **of_point} for row in pair_records(point.comparisons))

    def overview(self) -> Iterator[Record]:  # noqa: D102 - as in Tabular
        for name, method in self.methods.items():
            row: Record = {"method": name, "trainable": method.trainable}
            for task in self.tasks:
                metric = self.deciding[task].metric
                mean, verdict = self.mean(name, task, metric), self.verdict(name, task, self.baseline)
                shown = mean if verdict is None or mean is None else f"{mean:.4g} ({verdict.outcome})"
                row[f"{task} ({metric})"] = shown
            yield row

    def _why_not(self, method: str, other: str, task: str) -> str:
        """Say why a pair was not compared on a task."""
        if not self.complete:
            return "the run is not complete"
        if task not in self.tasks and (self.retention is None or task not in self.retention.texts):
            return "not measured"
        for name in (method, other):
            if name in self.methods and self.methods[name].all_diverged:
                return f"{name} diverged"
        other_measures = any(
            (each.method, each.reference, each.task) == (method, other, task) for each in self.comparisons
        )
        return "not all values are finite" if other_measures else "not compared"

    @cached_property
    def _loras(self) -> set[str]:
        return {name for name, method in self.methods.items() if is_lora(method.parts)}

    @cached_property
    def _index(self) -> dict[tuple[str, str | None, str, str], Comparison]:
        return {(each.method, each.reference, each.task, each.metric): each for each in self.comparisons}

    @cached_property
    def _decided(self) -> dict[tuple[str, str | None, str], Verdict]:
        return {(each.method, each.other, each.task): each for each in self.verdicts}
