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


class UnitProgress(Progress):
    """The progress of one unit in a worker: how far an evaluation is, in its file, and the run in one line.

    The file is beside the answers of a run so far; it goes with them when the evaluation is complete.

    Args:
        run: the run's folder; None in processes that write nothing.
    """

    def __init__(self, run: Path | None) -> None:
        self.summary: str | None = None
        self._run, self._last = run, -EVERY_S

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Write how far it is, unless that was done just now; a disk that is full is reported by what must be kept."""
        if self._run is not None and time.monotonic() - self._last >= EVERY_S:
            self._last = time.monotonic()
            with suppress(HfpatchError):
                write_json(_file(self._run), Scored(task, done, total)._asdict())

    def finished(self, run: str, summary: str) -> None:
        """Keep the line."""
        self.summary = summary


def read_scored(run: Path) -> Scored | None:
    """Return what was written last in a run's folder; None if nothing is there that can be read."""
    with suppress(HfpatchError, TypeError):
        return Scored(**read_json(_file(run)))
    return None


def _file(run: Path) -> Path:
    return RunPaths(run).answers / "scored.json"
