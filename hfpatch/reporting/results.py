"""Reading a run folder's ``results.json``: typed, tolerant of what is not there, and naming it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hfpatch.errors import HfpatchError
from hfpatch.reporting.salvage import salvage
from hfpatch.support.files import read_json

SCHEMA = 1
"""The newest ``results.json`` layout that this version reads."""

_OWN = {"schema", "methods"}
"""One of these keys is in every ``results.json`` of a run."""

Verdict = Literal["better", "worse", "within noise", "too few documents"]


def plain(value: Any) -> Any:
    """Return ``value`` with every character that neither XML nor UTF-8 can hold replaced, at any depth of JSON."""
    if isinstance(value, str):
        return "".join(char if _printable(char) else "\ufffd" for char in value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _printable(char: str) -> bool:
    code = ord(char)
    if code < 0x20:
        return char in "\t\n\r"
    return not (0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in (0xFFFE, 0xFFFF))


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {key: item for key, item in value.items() if isinstance(item, int | float) and not isinstance(item, bool)}


Numbers = Annotated[dict[str, float], BeforeValidator(_numbers)]
"""A mapping of names to numbers; whatever is not a number is left out (lm-eval writes "N/A" for a missing error)."""


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TrainOutcome(_Read):
    """What training one method with one seed took."""

    steps: int | None = None
    final_loss: float | None = None
    tokens: int | None = None
    wall_s: float | None = None
    tokens_per_s: float | None = None
    diverged_step: int | None = None
    peak_memory_bytes: float | None = None
    update_survival: Numbers = Field(default_factory=dict)


class TaskOutcome(_Read):
    """What one run scored on one task."""

    n: int | None = None
    metrics: Numbers = Field(default_factory=dict)
    stderr: Numbers = Field(default_factory=dict)


class RunOutcome(_Read):
    """One method with one seed; ``train`` is None where nothing is trained."""

    train: TrainOutcome | None = None
    evaluation: dict[str, TaskOutcome] = Field(default_factory=dict)


class Match(_Read):
    """The LoRA rank solved for another method's parameter count."""

    to: str
    rank: int
    parameters: int
    target_parameters: int


class MethodOutcome(_Read):
    """One method: its parts, what it trains, and its runs by seed."""

    name: str
    parts: tuple[dict[str, Any], ...] = ()
    trainable: int | None = None
    match: Match | None = None
    form: str | None = None
    runs: dict[int, RunOutcome] = Field(default_factory=dict)

    @property
    def diverged(self) -> dict[int, int]:
        """The seeds that diverged and the step of each."""
        steps = {seed: run.train.diverged_step for seed, run in sorted(self.runs.items()) if run.train is not None}
        return {seed: step for seed, step in steps.items() if step is not None}


class Comparison(_Read):
    """A paired comparison of one method with another on one task; all numbers in the metric's own unit.

    Where there are too few documents for an interval, it is unbounded.
    """

    method: str
    reference: str
    task: str
    metric: str
    n: int | None = None
    seeds: int | None = None
    difference: float
    low: Annotated[float, BeforeValidator(lambda end: -inf if end is None else end)]
    high: Annotated[float, BeforeValidator(lambda end: inf if end is None else end)]
    p: float | None = None
    p_holm: float | None = None
    test: str = ""
    smallest_visible: float | None = None
    verdict: Verdict

    @property
    def falls_to_correction(self) -> bool:
        """Whether the test alone finds a difference at 5 %, which does not stand after Holm's correction."""
        return self.verdict == "within noise" and self.p is not None and self.p < 0.05


class TaskInfo(_Read):
    """What a task measures."""

    primary: str
    higher_is_better: bool = True
    n: int | None = None
    data_sha256: str | None = None
    version: str | int | float | None = None


class Results(_Read):
    """A run as its folder tells it; ``missing`` names, one sentence each, what should be there and is not."""

    name: str = ""
    description: str = ""
    protocol: str = "custom"
    complete: bool = False
    provenance: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    plan: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    evaluation: dict[str, Any] = Field(default_factory=dict)
    tasks: dict[str, TaskInfo] = Field(default_factory=dict)
    methods: dict[str, MethodOutcome] = Field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    correction: str = "tasks"
    """What the comparisons are corrected over; earlier versions, which corrected over tasks alone, wrote nothing."""
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def baseline(self) -> str | None:
        """The method that adds nothing: what the others are compared with."""
        if "baseline" in self.methods and not self.methods["baseline"].parts:
            return "baseline"
        return next((name for name, method in self.methods.items() if not method.parts), None)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that the run asked for and those it holds."""
        asked = self.training.get("seeds")
        planned = {seed for seed in asked if isinstance(seed, int)} if isinstance(asked, list) else set()
        trained = (method for method in self.methods.values() if method.parts)  # the base alone has no seed
        return tuple(sorted(planned | {seed for method in trained for seed in method.runs}))

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
        """The comparisons by method, reference, task and metric; of two alike the first."""
        return {(c.method, c.reference, c.task, c.metric): c for c in reversed(self.comparisons)}


def read_results(run_dir: Path) -> Results:
    """Read ``run_dir/results.json``.

    What is absent or malformed is left out and named in ``Results.missing``; the rest is read. Where there is no
    ``results.json`` that can be read, the files of the single runs are.

    Raises:
        HfpatchError: if there is no run in the folder, or a pretraining study or an evaluation; ``results.json`` is
            not a JSON object or not hfpatch's, or a newer version of hfpatch wrote it.
    """
    path = run_dir / "results.json"
    raw, broken = _raw(run_dir)
    if raw.get("kind") == "pretraining":
        raise HfpatchError(f"{run_dir}: is a pretraining study, no comparison; hfpatch report writes its report")
    if "variants" in raw:
        raise HfpatchError(f"{run_dir}: is an evaluation, which has no report; its scores are in {path}")
    if not raw.keys() & _OWN:
        raise HfpatchError(f"{path}: is not what hfpatch compare writes; give the folder of a run")
    schema = raw.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise HfpatchError(f"{path}: layout {schema!r} is not known to this version (up to {SCHEMA}); update hfpatch")
    results, unread = _parse(raw)
    return results.model_copy(update={"missing": (*broken, *unread, *_absent(results))})


def _raw(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of results.json, or what the runs' own files tell where it is missing or broken."""
    path = run_dir / "results.json"
    if path.is_file():
        try:
            return plain(read_json(path)), []
        except HfpatchError as error:
            why = str(error).removeprefix(f"{path}: ").partition(" (")[0]
    else:
        why = "is missing"
    salvaged, broken = salvage(run_dir)
    if salvaged is not None:
        return plain(salvaged), [f"results.json {why}: this is what the folders of the runs tell.", *map(plain, broken)]
    if path.is_file():
        raise HfpatchError(f"{path}: {why}; give the folder that hfpatch compare wrote")
    raise HfpatchError(f"{run_dir}: no run here (results.json is missing); give the folder hfpatch compare wrote")


_Model = TypeVar("_Model", bound=BaseModel)


class _Reader:
    """Validates piece by piece, so that one broken piece does not hide the others."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def read(self, kind: type[_Model], value: Any, where: str) -> _Model | None:
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            self.broken.append(f"{where} in results.json cannot be read ({field or 'value'}: {first['msg'].lower()}).")
            return None

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.broken.append(f"{where} in results.json cannot be read (not a mapping).")
        return {}

    def sequence(self, value: Any, where: str) -> list[Any]:
        if value is None or isinstance(value, list):
            return value or []
        self.broken.append(f"{where} in results.json cannot be read (not a list).")
        return []


def _parse(raw: dict[str, Any]) -> tuple[Results, list[str]]:
    reader = _Reader()
    sections = ("provenance", "model", "data", "plan", "training", "evaluation")
    fields: dict[str, Any] = {name: reader.mapping(raw.get(name), name) for name in sections}
    fields.update({name: str(raw[name]) for name in ("name", "description", "protocol", "correction") if raw.get(name)})
    tasks = reader.mapping(raw.get("tasks"), "tasks").items()
    fields["tasks"] = _present({name: reader.read(TaskInfo, value, f"task {name}") for name, value in tasks})
    methods = reader.mapping(raw.get("methods"), "methods").items()
    fields["methods"] = _present({name: _method(reader, name, value) for name, value in methods})
    comparisons = reader.sequence(raw.get("comparisons"), "comparisons")
    read = [reader.read(Comparison, value, f"comparison {i}") for i, value in enumerate(comparisons)]
    fields["comparisons"] = tuple(comparison for comparison in read if comparison is not None)
    fields["warnings"] = tuple(str(warning) for warning in reader.sequence(raw.get("warnings"), "warnings"))
    return Results(complete=raw.get("complete") is True, **fields), reader.broken


def _present(items: dict[str, _Model | None]) -> dict[str, _Model]:
    return {name: item for name, item in items.items() if item is not None}


def _method(reader: _Reader, name: str, value: Any) -> MethodOutcome | None:
    raw = reader.mapping(value, name)
    runs = {}
    for seed, run in reader.mapping(raw.get("runs"), f"{name}: runs").items():
        if seed.isdecimal():
            runs[int(seed)] = _run(reader, f"{name}, seed {seed}", run)
    parameters = reader.mapping(raw.get("parameters"), f"{name}: parameters")
    fields = {"name": name, "parts": raw.get("parts") or [], "trainable": parameters.get("trainable")}
    match = reader.read(Match, raw["match"], f"{name}: match") if raw.get("match") else None
    outcome = reader.read(MethodOutcome, {**fields, "form": raw.get("form")}, name)
    return outcome.model_copy(update={"match": match, "runs": runs}) if outcome else None


def _run(reader: _Reader, where: str, value: Any) -> RunOutcome:
    raw = reader.mapping(value, where)
    train = reader.read(TrainOutcome, raw["train"], f"{where}: train") if raw.get("train") else None
    tasks = reader.mapping(raw.get("evaluation"), f"{where}: evaluation").items()
    outcomes = {task: reader.read(TaskOutcome, outcome, f"{where}: {task}") for task, outcome in tasks}
    return RunOutcome(train=train, evaluation=_present(outcomes))


def _absent(results: Results) -> list[str]:
    """Name what a complete run would hold and this one does not."""
    found = []
    if not results.complete:
        found.append("The run is not complete: the same hfpatch compare with --resume finishes it.")
    if not results.methods:
        found.append("No method has a result.")
    if not results.tasks:
        found.append("No task has a result.")
    for name, method in results.methods.items():
        found += _absent_runs(results, name, method)
    if results.tasks and len(results.methods) > 1 and not results.comparisons:
        found.append("No paired comparison was made.")
    return found


def _absent_runs(results: Results, name: str, method: MethodOutcome) -> list[str]:
    if not method.runs:
        return [f"{name}: no run is finished."]
    absent = [seed for seed in results.seeds if seed not in method.runs] if method.parts else []
    found = [f"{name}: no finished run with seed {seed}." for seed in absent]
    for seed, run in sorted(method.runs.items()):
        if seed in method.diverged:
            continue
        tasks = [task for task, info in results.tasks.items() if info.primary not in _metrics(run, task)]
        found += [f"{name}, seed {seed}: no result on {', '.join(tasks)}."] if tasks else []
    return found


def _metrics(run: RunOutcome, task: str) -> dict[str, float]:
    return run.evaluation[task].metrics if task in run.evaluation else {}
