"""The JSON files of a run, typed: what its training, its evaluation and further measurements leave in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

from pydantic import Field

from hfpatch.recipes.strict import validate
from hfpatch.results.parts import Part, TaskResult, TrainResult, Values
from hfpatch.results.records import DocumentLosses
from hfpatch.results.schema import Cost, LayerSeries, Rewound, Run
from hfpatch.support.files import read_json, write_json

Identity: TypeAlias = dict[str, str | None]
"""A SHA-256 by name, see :data:`hfpatch.runs.identity.NAMES`; None where there is no such thing."""
AnyFile = TypeVar("AnyFile", bound="Stored")


class Stored(Part):
    """A JSON file."""

    @classmethod
    def read(cls: type[AnyFile], path: Path) -> AnyFile:
        """Return the content of a file.

        Raises:
            HfpatchError: if it cannot be read, or has another layout; the message names the first thing that is wrong.
        """
        return validate(read_json(path), cls, str(path))

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(path, self.to_json())


class Record(Stored):
    """A file of a run.

    Attributes:
        identity: the hashes of what it was made with; empty where the file has none.
    """

    identity: Identity = Field(default_factory=dict)


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

    @classmethod
    def of(cls, outcome: TrainResult, identity: Identity, more: Mapping[str, object]) -> Trained:
        """Return the record of an outcome, with ``more`` of a trial in place of what the training measured."""
        return cls.model_validate({**dict(outcome), **more, "identity": identity})


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
        """Its scores in one line, or that it diverged."""
        if self.diverged_step is not None:
            return f"diverged at step {self.diverged_step}"
        scores = self.evaluation.values()
        return ", ".join(f"{score.task} {score.primary} {score.metrics[score.primary]:.4g}" for score in scores)


class Measurement(Rewound, Record):
    """``retention.json``, or ``rewind/<scale>/result.json``: what was measured of a saved patch besides its tasks."""

    commit: str | None = None
    evaluation: dict[str, TaskResult] = Field(default_factory=dict)  # type: ignore[assignment]  # as in `RunResult`


class PretrainingResult(Record):
    """``result.json`` of a single model from scratch."""

    provenance: Values
    data: Values
    plan: Values
    parameters: Values
    train: TrainResult

    @property
    def summary(self) -> str:
        """Its losses in one line, or that it diverged."""
        train = self.train
        if train.diverged_step is not None:
            return f"diverged at step {train.diverged_step}"
        measured = train.final_eval_loss
        return f"loss {train.final_loss:.4f}" + ("" if measured is None else f", on held-out text {measured:.4f}")


class Costs(Stored):
    """``costs.json``: what a training step of each method costs, in a run folder."""

    methods: dict[str, Cost]
