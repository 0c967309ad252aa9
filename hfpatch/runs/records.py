"""The JSON files of run folders, typed; ``results.json`` is in :mod:`hfpatch.results`.

A file that cannot be read, or has another layout, is an `HfpatchError` that names the first thing that is wrong.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import validate
from hfpatch.results.layout import Cost, LayerSeries, Run
from hfpatch.results.parts import Part, TaskResult, TrainResult, Values
from hfpatch.results.records import DocumentLosses
from hfpatch.results.retention import Rewound
from hfpatch.results.verdicts import LookTaken, PrimaryQuestion
from hfpatch.support.cpu import MatmulLibrary
from hfpatch.support.files import clear_about_writing, hash_values, read_json, temporary_path, write_json
from hfpatch.training.records import StepRecord

AnyFile = TypeVar("AnyFile", bound="Stored")


class Stored(Part):
    """A JSON file; where it is ``as_given``, without the fields that were not given."""

    as_given: ClassVar[bool] = False
    remedy: ClassVar[str] = "restore it, or delete it, and --resume makes it again"

    @classmethod
    def read(cls: type[AnyFile], path: Path) -> AnyFile:
        """Return the content of a file.

        Raises:
            HfpatchError: if it is damaged, with what can be done.
        """
        try:
            return validate(read_json(path), cls, str(path))
        except HfpatchError as error:
            # a run that has scores already would not be trained again
            of_run = "restore it, or delete its folder, and --resume trains the run again"
            raise HfpatchError(f"{error}; {of_run if path.name == 'training.json' else cls.remedy}") from error

    def to_json(self) -> dict[str, Any]:
        """Return the content."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=self.as_given)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(path, self.to_json())


class Identity(Stored):
    """The inputs of a run by their SHA-256, in the order in which they are compared; None where there is no such thing.

    :data:`hfpatch.runs.identity.NAMES` says what each is.
    """

    remedy: ClassVar[str] = "restore it, or choose another folder"
    base_weights: str | None = None
    base_buffers: str | None = None
    base_config: str | None = None
    base_code: str | None = None
    tokenizer: str | None = None
    text: str | None = None
    evaluation_text: str | None = None
    tuning_text: str | None = None
    method: str | None = None
    architecture: str | None = None
    plan: str | None = None
    training: str | None = None
    retention_text: str | None = None

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was not given, here and where it is a part of other files."""
        return {name: value for name, value in dump(self).items() if name in self.model_fields_set}


class Shared(Identity):
    """``identity.json``: what all runs of a folder share, with their library for matrix products."""

    matmul: MatmulLibrary | None = None


class Questions(Stored):
    """``questions.json``: the primary questions of a comparison, as they were before its first result.

    Attributes:
        questions: the questions.
        margin: the margins.
        seeds: the seeds, which may grow, as may the documents.
        documents: the limit of all tasks, and those of tasks with another one; a study has none.
        later: whether there was a result already.
        sha256: of everything else.
    """

    as_given = True
    remedy = "restore it; without it --resume declares them again, and marks them where there are results already"
    questions: list[PrimaryQuestion]
    margin: dict[str, float]
    seeds: list[int]
    documents: tuple[int | float | None, dict[str, int | float]] | None = None
    later: bool = False
    sha256: str = ""

    @property
    def hash(self) -> str:
        """The value of ``sha256`` in a file that was not changed."""
        return hash_values([self.model_dump(mode="json", exclude={"later", "sha256"}, exclude_unset=True), self.later])


class Looks(Stored):
    """``looks.json``: the looks that were taken in a run folder, in their order; every session takes them again."""

    file: ClassVar[str] = "looks.json"
    looks: list[LookTaken] = Field(default_factory=list)

    @classmethod
    def of(cls, out: Path) -> list[LookTaken]:
        """Return the looks of a run folder."""
        return cls.read(out / cls.file).looks if (out / cls.file).is_file() else []


class EvaluationIdentity(Stored):
    """``evaluation.json``: what decides the scores in the folder of an evaluation.

    Attributes:
        models: each base or model, by label: how it is loaded, and the hashes of its weights and its ``patch``.
        settings: the settings, without the limits.
        limits: how many documents of each task are scored, which may grow; None is all.
    """

    as_given = True
    remedy = Identity.remedy
    models: dict[str, Values]
    settings: Values = Field(default_factory=dict)
    limits: dict[str, int | None] = Field(default_factory=dict)


class Record(Stored):
    """A file of a run.

    Attributes:
        identity: what it was made with; empty where the file has none.
    """

    identity: Identity = Field(default_factory=Identity)


class Losses(Stored):
    """``tuning.json``: the base's nats and predicted tokens of each document of tuning's text."""

    losses: DocumentLosses


class Trained(TrainResult, Record):
    """``training.json``: the outcome of a training, written after what it saves.

    Attributes:
        losses: of a trial of tuning the same as in `Losses`, whose ratio is ``final_eval_loss``.
        commit: of a trial the commit of hfpatch that made it.
    """

    losses: DocumentLosses | None = None
    commit: str | None = None


class RunResult(Run, Record):
    """``result.json``: the outcome of a run with one seed, written last; `Measurement` has what is measured further.

    Attributes:
        evaluation: the scores by task; none of a run that diverged.
        layers: the norms of its patch by layer.
    """

    evaluation: dict[str, TaskResult] = Field(default_factory=dict)  # type: ignore[assignment]  # narrower, and frozen
    layers: list[LayerSeries] = Field(default_factory=list)

    @property
    def summary(self) -> str:
        """Its scores in one line, or its training loss where there are none, or that it diverged."""
        if self.diverged_step is not None:
            return f"diverged at step {self.diverged_step}"
        scores = self.evaluation.values()
        if not scores and self.train is not None:
            return f"training loss {self.train.final_loss:.4f}"
        return ", ".join(f"{score.task} {score.primary} {score.metrics[score.primary]:.4g}" for score in scores)


class Measurement(Rewound, Record):
    """``retention.json``, or ``rewind/<scale>/result.json``: what was measured of a saved patch besides its tasks."""

    commit: str | None = None
    evaluation: dict[str, TaskResult] = Field(default_factory=dict)  # type: ignore[assignment]  # as in `RunResult`


class Times(Part):
    """When a run first started, ISO 8601, and how long all its sessions have taken."""

    started: str
    wall_s: float


class ResultsHead(Stored):
    """What a command reads of ``results.json`` before it goes on.

    Attributes:
        complete: whether everything that the folder's recipe asks for is done.
        provenance: the times.
    """

    complete: bool
    provenance: Times


class Costs(Stored):
    """``costs.json``: what a training step of each method costs, in a run folder."""

    methods: dict[str, Cost]


class Entry(Part):
    """``.queue/*/*/<number>.json``: a unit that is ready for workers, and what becomes of it.

    Only the driver writes it while no worker has the unit, and only that worker while it has; it need not outlive them.

    Attributes:
        attempts: how many workers have begun the unit.
        seat: the driver's number for the worker that has it, or had it to the end; -1 while it waits for one.
        node: the worker's machine and process id.
        lock: the token of its lock.
        ended: whether the unit is complete or has failed.
        error: why it failed.
        events: the arguments of the last call of each method of `hfpatch.runs.progress.Progress`, without the run.
        warnings: those of hfpatch itself.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    attempts: int = 0
    seat: int = -1
    node: str = ""
    lock: str = ""
    ended: bool = False
    error: str | None = None
    events: dict[str, list[StepRecord | Any]] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)

    @classmethod
    def find(cls, path: Path) -> Entry | None:
        """Return the content of a file; None where there is none any more."""
        with suppress(OSError, ValidationError):
            return cls.model_validate_json(path.read_bytes())
        return None

    def write(self, path: Path) -> None:
        """Replace the file at once, without waiting for the disk."""
        temporary = temporary_path(path, "tmp")
        with clear_about_writing(path):
            temporary.write_text(self.model_dump_json(), encoding="utf-8")
            temporary.replace(path)

    @property
    def waits(self) -> bool:
        """Whether the unit waits for a worker."""
        return self.seat < 0
