"""A job as its workers know it, where a worker is, and the outcome of a unit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs.locks import Holder


@dataclass(frozen=True)
class Job:
    """One command, as its workers must know it.

    Attributes:
        recipe: the recipe.
        out: the run folder, which every worker sees under this path.
        part: the variant that a study is limited to; None for all.
        holder: who holds the locks on the runs and lends them.
        folder: where the command was given, which relative paths in the recipe start from.
        threads: torch's threads for CPU work; None leaves them.
        processes: how many processes share a training.
        launch_config: accelerate's configuration file for them, None for plain data parallelism.
    """

    recipe: Recipe | StudyRecipe
    out: Path
    part: str | None
    holder: Holder
    folder: Path
    threads: int | None = None
    processes: int = 1
    launch_config: str | None = None


@dataclass(frozen=True)
class Place:
    """Where a worker is.

    Attributes:
        node: the machine, for messages.
        pid: its process id there.
    """

    node: str
    pid: int


@dataclass(frozen=True)
class Outcome:
    """The result of a unit.

    Attributes:
        error: why it failed; None if it is complete.
        ended: why its processes ended early; another worker can continue it.
        summary: the run in one line, where it is complete.
        warnings: hfpatch's own.
    """

    error: str | None = None
    ended: str | None = None
    summary: str | None = None
    warnings: tuple[str, ...] = ()
