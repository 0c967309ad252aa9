"""Reading the ``results.json`` of a pretraining study: strictly, and naming what it does not hold yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import read_yaml, validate
from hfpatch.reporting.results import TrainOutcome, plain
from hfpatch.reporting.study.words import and_seeds, point_text
from hfpatch.support.files import read_json

KIND = "pretraining"

Point = dict[str, Any]
"""A point of the sweep: dotted key -> value; empty without a sweep."""
AtStep = tuple[int, float | None, float | None, float | None]
ByStep = tuple[AtStep, ...]
"""A statistic by step: step, mean, low, high."""
PositiveCount = Annotated[int, Field(gt=0)]


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Parameters(_Read):
    """How many parameters a variant trains; the embeddings and what is tied to them left out of the second."""

    total: PositiveCount
    non_embedding: PositiveCount


class Variant(_Read):
    """One configuration: its query path in a line of maths, its architecture, and what it trains differently."""

    query: str = ""
    description: str = ""
    architecture: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    parameters: Parameters


class Loss(_Read):
    """The validation loss at the end, nats per token: mean and standard deviation over seeds, and each seed's."""

    mean: float
    sd: float | None = None
    values: dict[int, float] = Field(default_factory=dict)


class Improvement(_Read):
    """The share of the baseline's loss by which a variant's is lower, paired by seed, with its 95 % interval."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None


class Row(_Read):
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
    missing: tuple[int, ...] = ()
    improvement: Improvement | None = None
    curve: ByStep = ()
    improvement_by_step: ByStep = ()
    seconds_per_step: float | None = None


class Diagnostic(_Read):
    """What f does in one layer after a step: mean over tokens of ‖f(x)‖/‖A(x)‖ and of cos(f(x), A(x))."""

    step: int
    layer: int
    target: str = "query"
    size: float | None = None
    cosine: float | None = None


class StudyRun(_Read):
    """One variant at one point with one seed."""

    variant: str
    point: Point = Field(default_factory=dict)
    seed: int
    outcome: Literal["complete", "diverged"]
    diverged_step: int | None = None
    commit: str | None = None
    train: TrainOutcome | None = None
    evaluation: tuple[tuple[int, float | None], ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


class StudyResults(_Read):
    """A study as its ``results.json`` tells it; rows and runs stand in the order of the recipe."""

    kind: Literal["pretraining"]
    complete: bool
    name: str = ""
    description: str = ""
    provenance: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    evaluation_data: dict[str, Any] | None = None
    tokenizer: dict[str, Any] = Field(default_factory=dict)
    plans: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    seeds: tuple[int, ...]
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    baseline: str
    variants: Annotated[dict[str, Variant], Field(min_length=1)]
    rows: tuple[Row, ...] = ()
    runs: tuple[StudyRun, ...] = ()

    @model_validator(mode="after")
    def _hangs_together(self) -> StudyResults:
        if self.baseline not in self.variants:
            raise ValueError(f"baseline is {self.baseline!r}, which is not among variants")
        for kind, named in (("rows", self.rows), ("runs", self.runs)):
            stranger = next((each.variant for each in named if each.variant not in self.variants), None)
            if stranger is not None:
                raise ValueError(f"{kind} holds {stranger!r}, which is not among variants")
        return self

    @property
    def others(self) -> list[str]:
        """The variants that are compared with the baseline."""
        return [name for name in self.variants if name != self.baseline]

    @cached_property
    def chosen(self) -> dict[str, Row]:
        """The row that stands for each variant: its best point, or while there is none, its lowest so far."""
        found = {name: _chosen([row for row in self.rows if row.variant == name]) for name in self.variants}
        return {name: row for name, row in found.items() if row is not None}

    @property
    def common_architecture(self) -> dict[str, Any]:
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

    @property
    def missing(self) -> tuple[str, ...]:
        """What a complete study would hold and this one does not, a sentence each."""
        return tuple(_missing(self))


def is_study(run_dir: Path) -> bool:
    """Return whether a folder holds a pretraining study, by its results or, where these say nothing, its recipe."""
    with_results, with_recipe = run_dir / "results.json", run_dir / "recipe.yaml"
    try:
        raw = read_json(with_results) if with_results.is_file() else None
    except HfpatchError:
        raw = None
    if isinstance(raw, Mapping) and ("kind" in raw or "methods" in raw):
        return raw.get("kind") == KIND
    try:
        return with_recipe.is_file() and "variants" in read_yaml(with_recipe)
    except HfpatchError:
        return False


def read_study(run_dir: Path) -> StudyResults:
    """Read ``run_dir/results.json``.

    Raises:
        HfpatchError: if it is missing, is not JSON, or does not hold what a study's results hold; the line names the
            first thing that is wrong.
    """
    path = run_dir / "results.json"
    if not path.is_file():
        raise HfpatchError(f"{run_dir}: no result of this study yet; the same hfpatch pretrain with --resume goes on")
    return validate(_finite(plain(read_json(path))), StudyResults, str(path))


def _finite(value: Any) -> Any:
    """Return JSON with null for every number that is none, as a diverged run may hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _chosen(rows: list[Row]) -> Row | None:
    """Return the best row; else that of the lowest loss, of those the one with the most seeds; else the first."""
    best = next((row for row in rows if row.best), None)
    if best is not None or not rows:
        return best
    known = [row for row in rows if row.loss is not None]
    return min(known, key=lambda row: (len(row.missing) + len(row.diverged), _mean(row))) if known else rows[0]


def _mean(row: Row) -> float:
    return row.loss.mean if row.loss is not None else math.inf


def _missing(study: StudyResults) -> Iterator[str]:
    if not study.complete:
        yield "The study is not complete: the same hfpatch pretrain with --resume finishes it."
    for name in study.variants:
        rows = [row for row in study.rows if row.variant == name]
        if not rows:
            yield f"{name}: no run is finished."
        for row in rows:
            if row.missing:
                yield f"{_where(row)}: {and_seeds(row.missing)} not run yet."
            if row.loss is None and not row.missing and not row.diverged:
                yield f"{_where(row)}: no validation loss."
    measured = {run.variant for run in study.runs if run.diagnostics}
    ran = {run.variant for run in study.runs}
    for name, variant in study.variants.items():
        if _query_path(variant) == "nonlinear" and name in ran - measured:
            yield f"{name}: no diagnostics of f."


def _query_path(variant: Variant) -> Any:
    query = variant.architecture.get("query")
    return query.get("path") if isinstance(query, Mapping) else None


def _where(row: Row) -> str:
    return f"{row.variant}, {point_text(row.point)}" if row.point else row.variant
