"""Workers: each is a loop that takes the next unit of a queue that waits, tries its lock and completes it.

A worker is a process of this machine or a task of Ray. Where several processes share a run, all of them are one worker,
started by torchrun: the first takes units, and the others follow it.
"""

from __future__ import annotations

import os
import pickle
import platform
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from hfpatch.errors import HfpatchError, one_line
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.identity import check_shared, stored_library
from hfpatch.runs.locks import Holder, InUseError, birth, has_ended, hold
from hfpatch.runs.plan import MEASURING, Plan, Unit
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Entry
from hfpatch.runs.train_eval import TrainEvalSession
from hfpatch.support.cpu import pinned_library
from hfpatch.support.quiet import quiet_libraries
from hfpatch.support.signals import sigterm_answered_by
from hfpatch.support.sources import CODE_SHA256
from hfpatch.support.version import __version__
from hfpatch.training.interruption import Terminated, end_when, leave
from hfpatch.training.processes import start_processes
from hfpatch.training.sharding import DEEPSPEED, FSDP

TASK = "task"
"""The file in the folder of a worker with its job and its number."""
BORN = "*.born"
"""The files in it of its processes: their ids, and as content when they started, which tells ids apart that return."""
OPEN = "open"
"""The file in a queue with whose removal its workers end, after saving what they train."""
PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""How long to wait between two looks at a queue: ten times as long as one takes, which may be on a slow file system."""
TELL_S = 0.5
"""How often a worker writes how far its unit is."""
OTHERS_S = 5.0
"""How long a process that shares runs waits after an error: if another one has ended, it is ended within that time."""
EVENTS = ("started", "stepped", "evaluating", "scored", "finished")
_PACKAGE = str(Path(__file__).parents[2])


def current_versions() -> dict[str, str]:
    """Return the versions of Python, hfpatch and the packages that decide a number, as this process imported them."""
    packages = {name: version(name) for name in ("torch", "transformers", "peft")}
    code = {"hfpatch": __version__, "hfpatch's code": CODE_SHA256[:12]}
    return {"python": platform.python_version(), **code, **packages}


@dataclass(frozen=True)
class Job:
    """One command, as its workers must know it."""

    plan: Plan  # units of the queue are numbered by their order in it
    queue: Path  # a folder with an `Entry` for each ready unit, which every worker sees under this path
    parent: Holder  # the process with whose end workers on the same machine end
    folder: Path  # where the command was given, which relative paths start from
    threads: int  # torch's threads
    settings: EngineSettings
    versions: Mapping[str, str] = field(default_factory=current_versions)  # of the driver


def work(job: Job, seat: int) -> None:
    """Complete units until the driver closes the queue or is gone; then SIGTERM saves what is trained.

    Raises:
        HfpatchError: if this process has other versions than the driver, of another machine or after an edit.
    """
    node = socket.gethostname()
    differ = [
        f"{name} is {here} on {node} and {job.versions[name]} where the command was given"
        for name, here in current_versions().items()
        if here != job.versions[name]
    ]
    if differ:
        raise HfpatchError(
            f"{'; '.join(differ)}: it was changed since, or machines have different ones; use the same everywhere, and "
            "repeat the command with --resume"
        )
    with suppress(OSError):  # another machine need not have it, if all paths are absolute
        os.chdir(job.folder)
    worker = Worker(job, seat)
    end_when(lambda: not (job.queue / OPEN).exists() or bool(has_ended(job.parent)))
    with suppress(Terminated), sigterm_answered_by(leave):
        while True:
            begin = time.monotonic()
            if not any(map(worker.attempt, sorted(int(path.stem) for path in job.queue.glob("*.json")))):
                pause(begin)


class Worker:
    """Works on the units of one job, in the main thread of its own process, with the inputs loaded for the first."""

    def __init__(self, job: Job, seat: int) -> None:
        self.job, self.seat = job, seat
        self.leads = os.environ.get("RANK", "0") == "0"
        self._followed: set[int] = set()  # units that this process has shared with the first one
        self._session: TrainEvalSession | None = None

    def attempt(self, number: int) -> bool:
        """Complete a unit if it waits and its lock is free; return whether that was so.

        Raises:
            SystemExit: if processes that share runs cannot share another one.
            Terminated: if this process was asked to end; a checkpoint has been written then.
        """
        unit, file = self.job.plan.units[number], self.job.queue / f"{number}.json"
        entry = Entry.find(file)
        if entry is None or entry.seat != (-1 if self.leads else self.seat) or number in self._followed:
            return False
        if self.leads:
            try:
                with hold(self.job.plan.out, [unit.work_lock]) as lock:
                    entry = Entry.find(file)
                    if entry is None or not entry.waits:
                        return False
                    node = f"{socket.gethostname()}:{os.getpid()}"
                    entry = Entry(attempts=entry.attempts + 1, seat=self.seat, node=node, lock=lock["token"])
                    entry.write(file)
                    entry = self._complete(unit, entry, file)
            except InUseError:
                return False
        else:
            self._followed.add(number)
            entry = self._complete(unit, entry, file)
        if self.leads or entry.error is not None:
            entry.write(file)  # after the lock is released, as the driver ends all workers after the last unit
        if self.job.settings.processes > 1 and (entry.error is not None or self.job.settings.launch_config is not None):
            sys.exit(int(entry.error is not None))  # processes may wait for each other, or need another launcher
        return True

    def _complete(self, unit: Unit, entry: Entry, file: Path) -> Entry:
        """Complete a unit, from where another worker may have left it; return what has become of it."""
        job, progress, error, written_at = self.job, Progress(), None, 0.0

        def tell(event: str, run: str, *arguments: Any) -> None:
            nonlocal written_at
            entry.events[event] = list(arguments)
            if time.monotonic() - written_at >= TELL_S:
                written_at = time.monotonic()
                with suppress(HfpatchError):  # errors of a full disk are left to the files that must be kept
                    entry.write(file)

        for event in EVENTS if self.leads else ():
            setattr(progress, event, partial(tell, event))
        traceback_file = unit.run.folder / "error.txt"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if job.settings.launch_config is not None and unit.action in MEASURING:
                    os.environ.update({FSDP: "false", DEEPSPEED: "false"})  # it takes a whole model on each process
                start_processes().wait_for_everyone()
                if self._session is None:  # load what all units share
                    torch.set_num_threads(job.threads)
                    session = TrainEvalSession(job.plan)
                    with pinned_library(stored_library(job.plan.out)):
                        session.set_up()
                    check_shared(job.plan.out, session.setup.shared, session.setup.plans)
                    self._session = session
                self._session.progress = progress
                with pinned_library(self._session.setup.matmul):
                    self._session.complete(unit)
                traceback_file.unlink(missing_ok=True)
            except HfpatchError as problem:
                error = str(problem)
            except Exception as problem:  # whatever a method, a task or a library raises
                error = f"{unit.run.name}: {one_line(problem)}"
                with suppress(OSError):
                    traceback_file.parent.mkdir(parents=True, exist_ok=True)
                    traceback_file.write_text("".join(traceback.format_exception(problem)), encoding="utf-8")
                    error += f"; its traceback is in {traceback_file}"
        if error is not None:
            self._session = None  # its inputs may have changed
            if job.settings.processes > 1:  # an error that the end of another process caused is not the unit's
                time.sleep(OTHERS_S)
        messages = [str(warning.message) for warning in caught if warning.filename.startswith(_PACKAGE)]
        return entry.model_copy(update={"ended": True, "error": error, "warnings": messages})


def pause(begin: float) -> None:
    """Wait before the next look at a queue, longer where the last one, from ``begin``, took long."""
    time.sleep(min(LONGEST_PAUSE_S, max(PAUSE_S, 10 * (time.monotonic() - begin))))


def begin(folder: Path) -> None:
    """Work on what a new process finds in its folder, which is nothing if its worker was ended meanwhile."""
    (folder / BORN.replace("*", str(os.getpid()))).write_text(str(birth(os.getpid())))
    if not (folder / TASK).exists():
        return
    tqdm.set_lock(threading.RLock())  # the default is a semaphore, which leaks when the process is killed
    quiet_libraries()
    work(*pickle.loads((folder / TASK).read_bytes()))


if __name__ == "__main__":
    record(begin)(Path(sys.argv[1]))  # torchrun ends with the error of a process
