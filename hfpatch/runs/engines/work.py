"""`work`: the loop of every worker. It takes the next ready unit, tries its lock and completes it.

The driver of a command puts every ready unit into a `Queue`, a folder of small files; workers on any machine complete
them, and write there what became of them.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.launching import TASK, launch
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.identity import check_shared, stored_library
from hfpatch.runs.locks import Holder, InUseError, hand_over, has_ended, hold
from hfpatch.runs.plan import Plan, Unit
from hfpatch.runs.progress import Progress
from hfpatch.runs.session import Session
from hfpatch.support.cpu import pinned_library
from hfpatch.support.files import read_json
from hfpatch.support.quiet import quiet_libraries
from hfpatch.support.signals import sigterm_answered_by
from hfpatch.training.interruption import Terminated, end_when, leave
from hfpatch.training.processes import start_processes
from hfpatch.training.records import StepRecord

TRIES = 3
"""How often a unit is begun whose workers end before it does: chance ends one twice, hardly three times."""
PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""How long to wait between two looks at a queue: ten times as long as one takes, which may be on a slow file system."""
TELL_S = 0.5
"""How often a worker writes how far its unit is."""
EVENTS = ("started", "stepped", "evaluating", "scored", "finished")
_PACKAGE = str(Path(__file__).parents[2])


class Entry(NamedTuple):
    """A ready unit in the queue, and what became of it."""

    begun: int = 0  # how many workers have begun it
    seat: int = -1  # the driver's number of the last of them
    node: str = ""  # its machine and process id
    lock: str = ""  # the token of its lock
    ended: bool = False  # complete or failed
    error: str | None = None  # why it failed, or why its last worker ended before it did
    events: Mapping[str, Sequence[Any]] = {}  # the arguments of the last call of each method of `Progress`
    warnings: Sequence[str] = ()  # hfpatch's own

    @property
    def waits(self) -> bool:
        """Whether the unit waits for a worker; the driver sees which workers have ended."""
        return not self.ended and (self.begun == 0 or self.error is not None)

    def lost(self, name: str, reason: str) -> Entry:
        """Return the entry after its worker has ended: the unit is begun again, at most `TRIES` times in all."""
        if self.begun < TRIES:
            return self._replace(error=reason)
        return self._replace(ended=True, error=f"{name}: its worker ended {TRIES} times before it did ({reason})")


@dataclass(frozen=True)
class Queue:
    """The ready units of one command, a file for every one, named by its number in the plan."""

    folder: Path

    @property
    def is_open(self) -> bool:
        """Whether units may be begun; once the driver removes the file, workers end after saving what they train."""
        return (self.folder / "open").exists()

    def waiting(self) -> Iterator[int]:
        """Yield the units that wait for a worker, in the plan's order."""
        for number in sorted(int(path.stem) for path in self.folder.glob("*.json")):
            if (entry := self.read(number)) is not None and entry.waits:
                yield number

    def read(self, number: int) -> Entry | None:
        """Return an entry; None once the driver has removed it."""
        with suppress(HfpatchError):
            return Entry(**read_json(self.folder / f"{number}.json"))
        return None

    def write(self, number: int, entry: Entry) -> None:
        """Add an entry, or replace it at once."""
        beside = self.folder / f".{number}-{os.getpid()}"
        beside.write_text(json.dumps(entry._asdict()), encoding="utf-8")
        beside.replace(self.folder / f"{number}.json")


@dataclass(frozen=True)
class Job:
    """One command, as its workers must know it."""

    session: type[Session]
    plan: Plan  # units of the queue are numbered by their order in it
    queue: Path  # the queue's folder, which every worker sees under this path
    driver: Holder  # the process with whose end workers on the same machine end
    folder: Path  # where the command was given, which relative paths start from
    threads: int  # torch's threads
    settings: EngineSettings


class Worker:
    """Works on the units of one job, in the main thread of its own process, with the inputs loaded for the first."""

    def __init__(self, job: Job) -> None:
        self.job, self.queue, self.is_busy = job, Queue(job.queue), threading.Event()
        self._session: Session | None = None
        with suppress(OSError):  # another machine need not have it, if all paths are absolute
            os.chdir(job.folder)

    def attempt(self, number: int, seat: int) -> bool:
        """Try the lock of a ready unit and complete it; return whether it was free."""
        out, unit = self.job.plan.out, self.job.plan.units[number]
        with ExitStack() as stack:
            try:
                lock = stack.enter_context(hold(out, [unit.work_lock]))
            except InUseError:
                return False
            entry = self.queue.read(number)
            if entry is None or not entry.waits:
                return False
            node = f"{socket.gethostname()}:{os.getpid()}"
            self.queue.write(number, Entry(begun=entry.begun + 1, seat=seat, node=node, lock=lock["token"]))
            self.is_busy.set()
            try:
                if self.job.settings.processes == 1:
                    self.complete(number)
                else:  # which may outlive this process for as long as a step takes
                    reason = launch(self.job, number, partial(hand_over, out, unit.work_lock, lock))
                    entry = self.queue.read(number)
                    if entry is not None and not entry.ended:
                        self.queue.write(number, entry.lost(unit.run.name, reason))
            finally:
                self.is_busy.clear()
        return True

    def complete(self, number: int, *, writes: bool = True) -> bool:
        """Complete a unit, from where another worker may have left it; return whether it did not fail.

        Args:
            number: its number in the plan.
            writes: whether to write that it is complete, as the first of several processes does; all write errors.

        Raises:
            Terminated: if this process was asked to end; a checkpoint has been written then.
        """
        unit, progress, error, told = self.job.plan.units[number], Progress(), None, 0.0
        entry = self.queue.read(number) or Entry()
        events: dict[str, Sequence[Any]] = {}

        def tell(event: str, run: str, *arguments: Any) -> None:
            nonlocal told
            events[event] = [asdict(value) if isinstance(value, StepRecord) else value for value in arguments]
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                with suppress(OSError):  # errors of a full disk are left to the files that must be kept
                    self.queue.write(number, entry._replace(events=events))

        for event in EVENTS if writes else ():
            setattr(progress, event, partial(tell, event))
        traceback_file = unit.run.folder / "error.txt"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._complete(unit, progress)
                traceback_file.unlink(missing_ok=True)
            except HfpatchError as problem:
                error = str(problem)
            except Exception as problem:  # whatever a method, a task or a library raises
                text = " ".join(str(problem).split())
                error = f"{unit.run.name}: {type(problem).__name__}{': ' if text else ''}{text}"
                with suppress(OSError):
                    traceback_file.parent.mkdir(parents=True, exist_ok=True)
                    traceback_file.write_text("".join(traceback.format_exception(problem)), encoding="utf-8")
                    error += f"; its traceback is in {traceback_file}"
        if writes or error is not None:
            said = [str(warning.message) for warning in caught if warning.filename.startswith(_PACKAGE)]
            self.queue.write(number, entry._replace(ended=True, error=error, events=events, warnings=said))
        return error is None

    def _complete(self, unit: Unit, progress: Progress) -> None:
        job = self.job
        start_processes().wait_for_everyone()
        if self._session is None:  # load what all units share
            torch.set_num_threads(job.threads)
            session = job.session(job.plan)
            with pinned_library(stored_library(job.plan.out)):
                session.set_up()
            check_shared(job.plan.out, session.setup.shared, session.setup.plans)
            self._session = session
        self._session.progress = progress
        with pinned_library(self._session.setup.matmul):
            self._session.complete(unit)


def work(job: Job, seat: int) -> None:
    """Complete ready units until the driver closes the queue or is gone."""
    worker, queue = Worker(job), Queue(job.queue)

    def is_over() -> bool:
        return not queue.is_open or bool(has_ended(job.driver))

    end_when(lambda: worker.is_busy.is_set() and is_over())
    with suppress(Terminated), sigterm_answered_by(leave):
        while not is_over():
            begin = time.monotonic()
            if not any(worker.attempt(number, seat) for number in queue.waiting()):
                pause(begin)


def pause(begin: float) -> None:
    """Wait before the next look at a queue, longer where the last one, from ``begin``, took long."""
    time.sleep(min(LONGEST_PAUSE_S, max(PAUSE_S, 10 * (time.monotonic() - begin))))


def main(folder: Path) -> int:
    """Be a worker, or one of the processes that share a unit of a ``worker``; the task is in ``folder``."""
    job, number, worker = pickle.loads((folder / TASK).read_bytes())
    tqdm.set_lock(threading.RLock())  # the default is a semaphore, which leaks when the process is killed
    quiet_libraries()
    if worker is None:
        work(job, seat=number)
        return 0
    end_when(lambda: bool(has_ended(worker)), "worker")
    return int(not Worker(job).complete(number, writes=os.environ.get("RANK", "0") == "0"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
