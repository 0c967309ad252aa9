"""A worker process: it completes one unit at a time, with the inputs that it loaded for the first.

Nothing here imports torch before the first unit, so that a worker soon ignores Ctrl-C, which its driver handles.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hfpatch.errors import HfpatchError
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs.engines.job import Job, Outcome, Place
from hfpatch.runs.engines.launching import OUTCOME, TASK, launch
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.locks import has_ended, hold
from hfpatch.runs.plan import Unit, plan_comparison, plan_pretraining
from hfpatch.runs.progress import Progress
from hfpatch.support.files import read_json, write_json

if TYPE_CHECKING:
    from hfpatch.runs.session import Session

_PACKAGE = str(Path(__file__).parents[2])
_LOCK_WAIT_S = 20.0
"""How long to wait for a lock: the worker that had the run before may be about to end."""
SCORED = "scored.json"
SCORED_S = 1.0
"""How often a worker writes how far its evaluation is."""


class Scored(NamedTuple):
    """How many requests of a task are scored."""

    task: str
    done: int
    total: int


@dataclass(eq=False)
class UnitProgress(Progress):
    """The progress of one unit in a worker: an evaluation's progress, in a file, and the run in one line.

    The file is beside the answers of a run so far; it goes with them when the evaluation is complete.

    Args:
        run: the run's folder; None in processes that write nothing.
    """

    run: Path | None
    summary: str | None = field(default=None, init=False)
    _last: float = field(default=-SCORED_S, init=False)

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Write the progress, at most once a second; errors of a full disk are left to the files that must be kept."""
        if self.run is not None and time.monotonic() - self._last >= SCORED_S:
            self._last = time.monotonic()
            with suppress(HfpatchError):
                write_json(RunPaths(self.run).answers / SCORED, Scored(task, done, total)._asdict())

    def finished(self, run: str, summary: str) -> None:
        """Keep the line."""
        self.summary = summary


def read_scored(run: Path) -> Scored | None:
    """Return the last progress in a run's folder, or None."""
    with suppress(HfpatchError, TypeError):
        return Scored(**read_json(RunPaths(run).answers / SCORED))
    return None


class UnitWorker:
    """Works on the units of one job, in the main thread of its own process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        with suppress(OSError):  # another machine need not have it, if the recipe has absolute paths
            os.chdir(job.folder)
        self._session: Session | None = None

    @staticmethod
    def place() -> Place:
        """Return where this process is."""
        return Place(socket.gethostname(), os.getpid())

    def work(self, unit: Unit) -> Outcome:
        """Complete one unit, from where another worker may have left it; its errors are returned, not raised.

        Raises:
            Terminated: if this process was asked to end; a checkpoint has been written then.
        """
        said: list[str] = []
        traceback_file = unit.run.folder / "error.txt"
        try:
            if self.job.processes > 1:
                return launch(self.job, unit)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    summary = self._complete(unit)
                finally:
                    said = [str(each.message) for each in caught if each.filename.startswith(_PACKAGE)]
        except HfpatchError as error:
            return Outcome(error=str(error), warnings=tuple(said))
        except Exception as error:  # whatever a method, a task or a library raises
            text = " ".join(str(error).split())
            reason = f"{unit.run.name}: {type(error).__name__}{': ' if text else ''}{text}"
            with suppress(OSError):
                traceback_file.parent.mkdir(parents=True, exist_ok=True)
                traceback_file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
                reason += f"; its traceback is in {traceback_file}"
            return Outcome(error=reason, warnings=tuple(said))
        traceback_file.unlink(missing_ok=True)
        return Outcome(summary=summary, warnings=tuple(said))

    def _complete(self, unit: Unit) -> str | None:
        """Complete a unit under the lock on its run, which the first of several processes holds; return its summary."""
        import torch

        from hfpatch.runs.identity import check_shared, stored_library
        from hfpatch.support.cpu import pinned_library
        from hfpatch.training.processes import start_processes

        job, state = self.job, start_processes()
        lock = hold(job.out, [unit.run.lock], wait_s=_LOCK_WAIT_S, lender=job.holder)
        with lock if state.is_main_process else nullcontext():
            state.wait_for_everyone()
            # Load the inputs that all units share
            if self._session is None:
                if job.threads is not None:
                    torch.set_num_threads(job.threads)
                session: Session
                if isinstance(job.recipe, StudyRecipe):
                    from hfpatch.runs.pretraining import PretrainingSession

                    session = PretrainingSession(plan_pretraining(job.recipe, job.out, job.part))
                else:
                    from hfpatch.runs.train_eval import ComparisonSession

                    session = ComparisonSession(plan_comparison(job.recipe, job.out))
                with pinned_library(stored_library(job.out)):
                    session.set_up()
                check_shared(job.out, session.setup.shared, session.setup.plans)
                self._session = session

            session = self._session
            session.progress = shown = UnitProgress(unit.run.folder if state.is_main_process else None)
            with pinned_library(session.setup.matmul):
                session.complete(unit)
        return shown.summary


# Called in the processes of `concurrent.futures`

_worker: UnitWorker | None = None


def begin(job: Job, environment: dict[str, str | None]) -> None:
    """Make this process a worker: it ends with its parent, and leaves Ctrl-C to it.

    Args:
        job: the job.
        environment: variables to set, or with None to remove, before anything reads them.
    """
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    from tqdm import tqdm

    from hfpatch.support.quiet import quiet_libraries
    from hfpatch.training.interruption import end_with_parent, leave

    tqdm.set_lock(threading.RLock())  # the default is a semaphore, which leaks when the process is killed
    quiet_libraries()
    signal.signal(signal.SIGTERM, leave)
    end_with_parent("driver")
    _worker = UnitWorker(job)


def work(unit: Unit) -> Outcome:
    """Complete one unit in this process, which ends at once when it is asked to."""
    assert _worker is not None
    try:
        return _worker.work(unit)
    except SystemExit as end:  # `Terminated`
        os._exit(end.code if isinstance(end.code, int) else 1)


# Run by the processes of `hfpatch.runs.engines.launching`


def main(folder: Path) -> int:
    """Work on a unit as one of the processes that share it."""
    from hfpatch.support.quiet import quiet_libraries
    from hfpatch.training.interruption import end_when

    job, unit, worker = pickle.loads((folder / TASK).read_bytes())
    quiet_libraries()
    end_when(lambda: bool(has_ended(worker)), "worker")
    outcome = UnitWorker(job).work(unit)
    target = folder / OUTCOME.format(os.environ.get("RANK", "0"))
    partial = target.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(target)
    return int(outcome.error is not None or outcome.ended is not None)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
