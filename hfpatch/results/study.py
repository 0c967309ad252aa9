"""The results of a pretraining study of ``hfpatch pretrain``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, model_validator

from hfpatch.results.decision import ALPHA, reach
from hfpatch.results.parts import SCHEMA, Comparison, Part, TrainResult, Values
from hfpatch.results.tables import COST, Record, Tabular, pair_records
from hfpatch.results.verdicts import Measure, Verdict, judge

VALIDATION_LOSS = "validation loss"
"""The task by which a study's variants are compared."""
Count = Annotated[int, Field(gt=0)]
Point = Values
"""A point of a sweep: dotted key -> value; empty without a sweep."""
AtStep = tuple[int, float | None, float | None, float | None]
ByStep = list[AtStep]
"""A statistic by step: step, mean, low, high."""


class VariantParameters(Part):
    """How many parameters a variant trains; the second count is without embeddings and tied weights."""

    total: Count
    non_embedding: Count


class Variant(Part):
    """One configuration: its query path in a line of maths, its architecture, and its training settings."""

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
    """The share of the baseline's loss by which a variant's is lower, paired by seed, with its 95 % interval.

    ``choices`` says how many times as many points the one was chosen from as the other, rounded up; the interval and
    ``p`` are corrected for it. The number of variants is corrected for in the verdicts.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    choices: Annotated[int, Field(gt=0)] = 1


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
    """What f does in one layer after a step: mean over tokens of ‖f(x)‖/‖A(x)‖, of cos(f(x), A(x)), of ‖f(x)‖/‖x‖."""

    step: int
    layer: int
    target: str = "query"
    size: float | None = None
    cosine: float | None = None
    size_beside_x: float | None = None


class StudyRun(Part):
    """One variant at one point with one seed; ``evaluation`` has the loss after each step that measured it."""

    variant: str
    point: Point = Field(default_factory=dict)
    seed: int
    outcome: Literal["complete", "diverged"]
    diverged_step: int | None = None
    commit: str | None = None
    seconds_per_step: float | None = None
    train: TrainResult | None = None
    evaluation: list[tuple[int, float | None]] = Field(default_factory=list)
    diagnostics: list[Diagnostic] = Field(default_factory=list)


class StudyResults(Tabular):
    """The results of a study of ``hfpatch pretrain``; rows and runs are in the order of the recipe."""

    tables = ("rows", "verdicts", "runs", "curves")

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

    @model_validator(mode="after")
    def _names_are_known(self) -> StudyResults:
        if self.baseline not in self.variants:
            raise ValueError(f"baseline is {self.baseline!r}, which is not among variants")
        for kind, named in (("rows", self.rows), ("runs", self.runs)):
            unknown = next((each.variant for each in named if each.variant not in self.variants), None)
            if unknown is not None:
                raise ValueError(f"{kind} names {unknown!r}, which is not among variants")
        return self

    @computed_field  # type: ignore[prop-decorator]  # pydantic stacks it on properties
    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict on each variant at its best point against the baseline's; the task is the validation loss."""
        made = []
        for row in filter(None, map(self.chosen.get, self.others)):
            if (found := row.improvement) is None:
                continue
            seeds = len(self.seed_values(row))
            tested = row.best and found.p is not None
            why = "one seed" if row.best else "the best point is not known yet"
            comparison = Comparison(
                method=row.variant,
                reference=self.baseline,
                task=VALIDATION_LOSS,
                metric="improvement",
                n=0,
                seeds=seeds,
                difference=found.mean,
                low=-math.inf if found.low is None else found.low,
                high=math.inf if found.high is None else found.high,
                p=found.p if tested else None,
                test="paired t over seeds" if tested else f"none ({why})",
                errors=_errors(found, seeds),
                choices=found.choices,
            )
            made.append(comparison)
        pairs = [(name, self.baseline) for name in self.others]
        return judge(made, {"base": pairs}, {VALIDATION_LOSS: Measure("improvement", True)}) if pairs else []

    def verdict(self, variant: str) -> Verdict:
        """Return the verdict on a variant."""
        return next(each for each in self.verdicts if each.method == variant)

    def records(self, table: str) -> Iterator[Record]:  # noqa: D102 - as in Tabular
        match table:
            case "rows":
                for row in self.rows:
                    gain = row.improvement
                    yield {
                        **{"variant": row.variant, **row.point, "best": row.best},
                        **{"seeds": len(row.loss.values) if row.loss else 0},
                        **{"loss": row.loss.mean if row.loss else None, "sd": row.loss.sd if row.loss else None},
                        **{"improvement": gain and gain.mean, "low": gain and gain.low, "high": gain and gain.high},
                        **{"p": gain and gain.p, "diverged": len(row.diverged)},
                        "seconds_per_step": row.seconds_per_step,
                        **self.variants[row.variant].parameters.to_json(),
                    }
            case "verdicts":
                yield from pair_records(self.verdicts)
            case "runs":
                for run in self.runs:
                    loss = run.evaluation[-1][1] if run.evaluation else None
                    yield {
                        **{"variant": run.variant, **run.point, "seed": run.seed, "outcome": run.outcome},
                        **{"diverged_step": run.diverged_step, "loss": loss},
                        **{key: getattr(run.train, key, None) for key in ("steps", "tokens", *COST)},
                    }
            case "curves":
                for run in self.runs:
                    of_run = {"variant": run.variant, **run.point, "seed": run.seed}
                    yield from ({**of_run, "step": step, "loss": loss} for step, loss in run.evaluation)

    def overview(self) -> Iterator[Record]:  # noqa: D102 - as in Tabular
        left_out = ("sd", "seconds_per_step", "diverged", "best")
        for record in self.records("rows"):
            yield {key: value for key, value in record.items() if key not in left_out}

    @property
    def others(self) -> list[str]:
        """The variants that are compared with the baseline."""
        return [name for name in self.variants if name != self.baseline]

    @cached_property
    def chosen(self) -> dict[str, Row]:
        """The row that represents each variant: its best point, or while there is none, its lowest so far.

        The lowest is taken among the rows with the most seeds; without any loss it is the first.
        """

        def rank(row: Row) -> tuple[bool, bool, int, float]:
            mean = math.inf if row.loss is None else row.loss.mean
            return not row.best, row.loss is None, len(row.missing) + len(row.diverged), mean

        rows = {name: [row for row in self.rows if row.variant == name] for name in self.variants}
        return {name: min(own, key=rank) for name, own in rows.items() if own}

    @property
    def common_architecture(self) -> Values:
        """The settings that all architectures share; all of them where there is one variant."""
        first, *others = (variant.architecture for variant in self.variants.values())
        return {
            key: value for key, value in first.items() if all(key in other and other[key] == value for other in others)
        }

    def tried(self, variant: str) -> list[Point]:
        """Return the points of a variant that a seed has run at, whether it diverged there or not."""
        return [row.point for row in self.rows if row.variant == variant and len(row.missing) < len(self.seeds)]

    @cached_property
    def tried_counts(self) -> dict[str, int]:
        """How many points each variant was tried at, without variants that were not."""
        counts = {name: len(self.tried(name)) for name in self.variants}
        return {name: count for name, count in counts.items() if count}

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


def _errors(found: Improvement, seeds: int) -> list[tuple[float, float]]:
    """Return the standard error over seeds that an interval shows, and its degrees of freedom."""
    if seeds < 2 or found.low is None or found.high is None:
        return []
    return [((found.high - found.low) / 2 / float(reach([(1.0, seeds - 1)], ALPHA / found.choices)), seeds - 1)]
