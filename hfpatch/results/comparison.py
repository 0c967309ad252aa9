"""The results of a comparison: what its file holds, and the verdicts, tables and answers that follow from that."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, computed_field, model_validator

from hfpatch.errors import nearest
from hfpatch.recipes.budgets import family_of
from hfpatch.recipes.methods import check_chosen
from hfpatch.recipes.pairs import Question
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.results.frontier import Frontier
from hfpatch.results.layout import Method, Run, Study
from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.parts import NATS_PER_TOKEN, SCHEMA, Comparison, Task, TaskResult, Values, task_results, with_names
from hfpatch.results.retention import RETENTION, KeptAnswers, Retention, RetentionPoint
from hfpatch.results.tables import Record, Tabular, pair_records, score_records
from hfpatch.results.tuning import Tuning
from hfpatch.results.verdicts import (
    INCOMPLETE,
    LookTaken,
    Measure,
    PrimaryQuestion,
    Reason,
    Verdict,
    deciding,
    judge,
    judge_primary,
    with_rates,
)

_COST = ("final_loss", "wall_s", "tokens_per_s", "peak_memory_bytes")
_OF_TEXT = Measure(BITS_PER_BYTE, RETENTION[BITS_PER_BYTE])  # decides a text that should be kept


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
        retention: the changes on text that training should not change; None where the recipe names none.
        kept: the right answers that each method kept and won; None before the comparison is complete.
        warnings: the cautions.
        left_out: methods of the recipe that reach no size near their budget, with the reason; None without any.
        frontier: the methods by budget, where the recipe has budgets and is complete.
        looks: what was found with growing numbers of seeds, where the recipe has ``training.seeds.looks``. A primary
            pair's verdict is that of the look that decided it; plain intervals are not corrected for looks.
        runs_saved: the trainings that looks made unnecessary, of complete results.
        verdicts: the verdict of each pair on each task and text, by the measure that decides it: primary ones first.
            They follow from the rest.
    """

    tables = (
        *("scores", "methods", "verdicts", "comparisons", "curves", "layers", "diagnostics", "trials", "retention"),
    )

    kind: Literal["comparison"] = "comparison"
    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
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
    # The verdicts of the whole comparison, where a report has some methods or other names
    joined: list[Verdict] | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _names_are_methods(self) -> ComparisonResults:
        named = {"study.baseline": [self.study.baseline]} if self.study is not None else {}
        named["questions"] = [name for asked in self.questions for pair in asked.pairs for name in pair]
        for key, names in named.items():
            for name in names:
                if name not in self.methods:
                    raise ValueError(f"{key}: {name!r} is none of the methods{nearest(name, self.methods)}")
        return self

    @model_validator(mode="after")
    def _looks_are_numbers(self) -> ComparisonResults:
        seeds = self.training.get("seeds")
        looks = seeds.get("looks") if isinstance(seeds, dict) else [1]
        if not (isinstance(looks, list) and looks and all(isinstance(number, int) for number in looks)):
            raise ValueError(f"training.seeds is {seeds}; must be seeds, or have looks with numbers of seeds")
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
        one_look = LookTaken(seeds=len(self.seeds), part=1.0, comparisons=[*self.comparisons, *changes])
        measures = self.deciding | texts
        bits = None if self.tuning is None else self.tuning.bits_per_nat
        rates = partial(with_rates, errors=self.rate_errors, bits_per_nat=bits)
        diverged = {name: method.diverged for name, method in self.methods.items()}
        for asked in self.questions:
            given: Values = {"why_not": self._why_not, "diverged": diverged, "rates": rates}
            made += judge_primary(asked, self.looks or [one_look], measures, self.margin, **given)
        primary = {(*verdict.pair, verdict.task) for verdict in made}
        beside: Values = {"without": primary, "diverged": diverged}
        secondary = judge(self.comparisons, self.pairs, self.deciding, self._why_not, **beside)
        of_base = list(dict.fromkeys(one.pair for one in changes))
        secondary += judge(changes, {"retention": of_base}, texts, **beside)
        return [*made, *map(rates, secondary)]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> ComparisonResults:
        """Return a copy, without the cached values of the original."""
        copy = super().model_copy(update=update, deep=deep)
        for computed in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[computed]
        return copy

    def only(self, methods: Collection[str]) -> ComparisonResults:
        """Return the results of some methods and the baseline, with the p-values and verdicts of the whole comparison.

        A warning says so where any is left out.

        Raises:
            HfpatchError: if there is no such method, or none is named.
        """
        check_chosen(methods, self.methods, self.baseline, self.name)
        kept = {name: method for name, method in self.methods.items() if name in {self.baseline, *methods}}
        if len(kept) == len(self.methods):
            return self
        shown = len(kept) - (self.baseline in kept)
        note = (
            f"Shown are {shown} of {len(self.others)} methods: p-values and verdicts are those of the whole "
            "comparison, corrected over all its methods."
        )
        update: Values = {
            "methods": kept,
            "comparisons": [one for one in self.comparisons if kept.keys() >= {*one.pair}],
            "joined": [verdict for verdict in self.verdicts if kept.keys() >= {*verdict.pair}],
            "kept": self.kept and [answers for answers in self.kept if answers.method in kept],
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
        return {name: method.label if method.label in free else name for name, method in self.methods.items()}

    def labelled(self) -> ComparisonResults:
        """Return the results with every method under its label, for tables and figures."""
        names = self.labels
        if all(name == label for name, label in names.items()):
            return self
        families = {family_of(name): family_of(label) for name, label in names.items()}
        results: ComparisonResults = with_names(self.model_copy(update={"joined": self.verdicts}), families | names)
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

    @property
    def tuned_noun(self) -> str:
        """What a sentence calls a method that was tuned: a tuned variant in a study that did not tune all of them."""
        chosen = self.tuning.chosen if self.tuning is not None else {}
        return f"tuned {self.noun}" if self.study is not None and self.methods.keys() - chosen else self.noun

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
    def runs(self) -> dict[str, Run]:
        """Every run by its method and seed, as sentences name it."""
        return {f"{name}, seed {seed}": run for name, one in self.methods.items() for seed, run in one.runs.items()}

    @property
    def commits(self) -> set[str]:
        """The commits of hfpatch that made the runs, as far as they are known."""
        return {run.commit for run in self.runs.values() if run.commit}

    @property
    def base_loss(self) -> float | None:
        """The base's loss on the text that is held out of the training text, in nats per token, or None."""
        held_out = self.data.get("held_out")
        loss = held_out.get("base_loss") if isinstance(held_out, dict) else None
        return loss if isinstance(loss, int | float) else None

    def comparison(self, method: str, task: str, reference: str | None, metric: str) -> Comparison | None:
        """Return the paired difference by a metric, if it was made."""
        return self._index.get((method, reference, task, metric))

    def gain_at(self, point: RetentionPoint) -> Comparison | None:
        """Return a point's difference on held-out text, in nats per token: below 0 it gains. None without such text."""
        if point.scale != 1:
            return point.comparison(HELD_OUT, NATS_PER_TOKEN)
        return self.comparison(point.method, HELD_OUT, self.baseline, NATS_PER_TOKEN)

    def verdict(self, method: str, task: str, other: str | None) -> Verdict | None:
        """Return the verdict of a pair on a task; None where no question compares the pair."""
        return self._decided.get((method, other, task))

    def compared_in(self, asked: Collection[tuple[str, str, str]]) -> list[Comparison]:
        """Return the comparisons, of tasks and of texts that should be kept, of pairs ``(method, other, task)``."""
        changes = self.retention.changes if self.retention is not None else []
        return [one for one in (*self.comparisons, *changes) if (*one.pair, one.task) in asked]

    @property
    def rate_errors(self) -> dict[str, float | None]:
        """What the choice of each method's rate may be worth, in nats per token, see :meth:`Tuning.rate_error`."""
        tuning = self.tuning
        return {} if tuning is None else {name: tuning.rate_error(name, self.base_loss) for name in tuning.chosen}

    @property
    def primary(self) -> list[Verdict]:
        """The verdicts of the primary questions."""
        return [verdict for verdict in self.verdicts if verdict.role == "primary"]

    @property
    def against_baseline(self) -> list[Verdict]:
        """The verdicts on a method and the baseline on a task, primary and secondary."""
        return [verdict for verdict in self.verdicts if verdict.other == self.baseline and verdict.task in self.tasks]

    @cached_property
    def deciding(self) -> dict[str, Measure]:
        """The measure that decides each task."""
        primary = {task: Measure(info.primary, info.higher_is_better) for task, info in self.tasks.items()}
        made = {(one.task, one.metric) for one in self.comparisons}
        runs = self.runs.values()
        scored = ((task, metric) for run in runs for task, score in run.evaluation.items() for metric in score.metrics)
        return deciding(primary, made or scored)

    def records(self, table: str) -> Iterator[Record]:  # noqa: D102 - as in Tabular
        match table:
            case "scores":
                for name, method in self.methods.items():
                    for seed, run in sorted(method.runs.items()):
                        of_run = {"method": name, "seed": seed, "trainable": method.trainable}
                        for score in task_results(self.tasks, run.evaluation).values():
                            yield from (of_run | row for row in score_records(score))
            case "methods":
                for name, method in self.methods.items():
                    yield {
                        "method": name,
                        **method.parameters.to_json(),
                        "form": method.form,
                        "matched_to": method.match.to if method.match is not None else None,
                        "seeds": len(method.runs),
                        "diverged": len(method.diverged),
                        "held_out_loss": self.mean(name, HELD_OUT, NATS_PER_TOKEN),
                        **{key: method.mean(key) for key in _COST},
                    }
            case "verdicts" | "comparisons":
                yield from pair_records(getattr(self, table))
            case "curves":
                for name, method in self.methods.items():
                    if (curve := method.curve) is not None:
                        by_step = dict(zip(curve.steps, curve.loss, strict=True))
                        for step in sorted({*by_step, *curve.held_out}):  # before the first step on held-out text alone
                            row = {"method": name, "step": step, "loss": by_step.get(step), "seeds": curve.seeds}
                            yield {**row, "held_out": curve.held_out.get(step)}
            case "layers":
                for name, method in self.methods.items():
                    for series in method.layers:
                        of_series = {"method": name, "quantity": series.quantity, "group": series.group}
                        for layer, value in sorted(series.points.items()):
                            yield {**of_series, "layer": layer, "value": value, "reference": series.reference}
            case "diagnostics":
                for name, method in self.methods.items():
                    for diagnostic in method.variant.diagnostics if method.variant is not None else ():
                        yield {"method": name, **diagnostic.to_json()}
            case "trials" if (tuning := self.tuning) is not None:
                for trial in tuning.trials:
                    row = {"method": trial.method, **trial.values, "loss": trial.loss}
                    row |= {"diverged_step": trial.diverged_step, "chosen": tuning.is_chosen(trial)}
                    yield {**row, "seed": trial.seed, "plan": trial.plan}
            case "retention" if (retention := self.retention) is not None:
                for point in retention.points:
                    of_point = {"method": point.method, "scale": point.scale, "tuning_loss": point.tuning_loss}
                    of_point["chosen"] = retention.chosen(point.method) == point.scale
                    gain = self.gain_at(point)
                    pairs = [*point.comparisons, *([gain] if gain is not None and point.scale == 1 else [])]
                    yield from (of_point | row for row in pair_records(pairs))

    def _why_not(self, method: str, other: str, task: str) -> Reason:
        """Say why a pair was not compared on a task."""
        if not self.complete:
            return Reason(text=INCOMPLETE)
        for name in (method, other):  # first, as a task that no run was scored on is none of the results
            if name in self.methods and self.methods[name].all_diverged:
                return Reason(methods={name: " diverged"})
        if task not in self.tasks and (self.retention is None or task not in self.retention.texts):
            return Reason(text="not measured")
        by_other_measures = self.compared_in([(method, other, task)])
        return Reason(text="not all values are finite" if by_other_measures else "not compared")

    @cached_property
    def _index(self) -> dict[tuple[str, str | None, str, str], Comparison]:
        return {(*one.pair, one.task, one.metric): one for one in self.comparisons}

    @cached_property
    def _decided(self) -> dict[tuple[str, str | None, str], Verdict]:
        return {(*verdict.pair, verdict.task): verdict for verdict in self.verdicts}
