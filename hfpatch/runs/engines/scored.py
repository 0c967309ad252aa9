"""How far an evaluation is: its worker writes that into the run's folder now and then, and the driver reads it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hfpatch.errors import HfpatchError
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.progress import Progress
from hfpatch.support.files import read_json, write_json

EVERY_S = 1.0
"""How often it is written."""


class Scored(NamedTuple):
    """How many requests of a task are scored."""

    task: str
    done: int
    total: int


class ScoredFile:
    """A file beside the answers of a run so far; it goes with them when the evaluation is complete."""

    def __init__(self, run: Path) -> None:
        self._path = RunPaths(run).answers / "scored.json"
        self._last = -EVERY_S

    def write(self, scored: Scored) -> None:
        """Write how far it is, unless that was done just now; a disk that is full is reported by what must be kept."""
        if time.monotonic() - self._last >= EVERY_S:
            self._last = time.monotonic()
            with suppress(HfpatchError):
                write_json(self._path, scored._asdict())

    def read(self) -> Scored | None:
        """Return what was written last; None if nothing is there that can be read."""
        with suppress(HfpatchError, TypeError):
            return Scored(**read_json(self._path))
        return None


class UnitProgress(Progress):
    """The progress of one unit in a worker: how far an evaluation is, in its file, and the run in one line.

    Args:
        run: the run's folder; None in processes that write nothing.
    """

    def __init__(self, run: Path | None) -> None:
        self.summary: str | None = None
        self._scored = ScoredFile(run) if run is not None else None

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Write how far it is."""
        if self._scored is not None:
            self._scored.write(Scored(task, done, total))

    def finished(self, run: str, summary: str) -> None:
        """Keep the line."""
        self.summary = summary
