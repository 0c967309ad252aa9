"""The driver of a plan's units: `Engine` completes them in this process, `Parallel` has workers complete them."""

from __future__ import annotations

import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.engines.work import PAUSE_S, TRIES, Entry, Job, Queue, pause
from hfpatch.runs.locks import STALE_S, hold, new_holder, remove_lost
from hfpatch.runs.plan import Plan
from hfpatch.runs.progress import Progress
from hfpatch.runs.session import Session
from hfpatch.training.interruption import Terminated, watch_sigterm
from hfpatch.training.processes import CPU_ONLY, start_processes
from hfpatch.training.records import StepRecord

if TYPE_CHECKING:
    from hfpatch.runs.engines.processes import Processes
    from hfpatch.runs.engines.ray import RayTasks

QUEUE = ".queue"
GRACE_S = 8.0
"""How long workers may take to save a checkpoint when the command is interrupted: schedulers kill after ten seconds."""
SAY_WAITING_S = 60.0
"""How often it is said that there is no worker yet."""


class Engine:
    """Executes the units of a plan: here in the plan's order, in this process, ending with the first that fails.

    In several processes, if a launcher started them, each unit is shared by all of them. `Parallel` executes several
    units at a time. The files of a unit depend neither on the engine nor on the units before it.

    Attributes:
        at_once: how many runs are worked on at a time, known once it is connected.
        measures: whether this process has the device that runs take, so that it can measure what they cost.
    """

    at_once = 1
    measures = True

    def connect(self, progress: Progress | None = None) -> None:
        """Find the devices that the runs ask for, before anything is written; ``progress`` is called if that is slow.

        Raises:
            HfpatchError: if they are not there.
        """

    def execute(self, session: Session) -> None:
        """Complete every unit of a plan.

        Raises:
            HfpatchError: if a unit fails, naming its run.
        """
        with queue_folder(session.plan):
            for unit in session.plan.units:
                due = session.is_due(unit)
                # A worker of a driver that was killed may not have ended yet
                waits = due and PartialState().is_main_process
                with hold(session.plan.out, [unit.work_lock], wait_s=2 * STALE_S) if waits else nullcontext():
                    session.complete(unit)
                if due:
                    session.record(unit)

    def close(self) -> None:
        """End everything that `connect` and `execute` started; also called after an error."""


@contextmanager
def queue_folder(plan: Plan) -> Iterator[Path]:
    """Yield a new name for the queue's folder, and remove it afterwards, and before what a killed driver has left.

    The command has the locks on the runs, so that no other one has a queue for them.
    """
    queues = plan.out.absolute() / QUEUE / (plan.part or "all")
    shutil.rmtree(queues, ignore_errors=True)
    try:
        yield queues / uuid.uuid4().hex
    finally:
        shutil.rmtree(queues, ignore_errors=True)
        with suppress(OSError):  # others may have theirs
            queues.parent.rmdir()


@dataclass(eq=False)
class Parallel(Engine):
    """Executes several units at a time, each in a worker; this process only collects their results.

    A unit that fails is reported in the end, after all units that do not need it. One whose worker ends before it
    does is begun again by another one, which continues from its checkpoint.

    Args:
        workers: where workers come from; both kinds have the same methods.
        settings: the options of the command.
    """

    workers: Processes | RayTasks
    settings: EngineSettings
    _threads: int | None = field(default=None, init=False)
    _cpu_only: str | None = field(default=None, init=False)

    def connect(self, progress: Progress | None = None) -> None:
        """Find the devices; they are left to the workers, and this process computes like one of them on the CPU."""
        if PartialState().num_processes > 1:
            raise HfpatchError("--jobs and --ray start processes of their own; leave out the launcher")
        if PartialState().device.type != "cpu":  # whose memory workers may be about to use
            os.environ[CPU_ONLY] = self._cpu_only = "true"
            self.measures = False
            PartialState._reset_state()
            start_processes()
        if progress is not None and self.settings.ray is not None:
            progress.preparing(f"starting or joining Ray ({self.settings.ray})")
        self.workers.connect()
        self.at_once = self.workers.room()
        self._threads = torch.get_num_threads()
        torch.set_num_threads(self.workers.threads)

    def execute(self, session: Session) -> None:
        """Complete every unit that neither fails nor needs one that fails."""
        with queue_folder(session.plan) as folder:
            job = Job(
                session=type(session),
                plan=session.plan,
                queue=folder,
                driver=new_holder(),
                folder=Path.cwd(),
                threads=self.workers.threads,
                settings=self.settings,
            )
            _Dispatch(session, self.workers, job).run()

    def close(self) -> None:
        """Release everything that `connect` took."""
        self.workers.close()
        if self._cpu_only is not None:
            os.environ.pop(CPU_ONLY)
            PartialState._reset_state()
        if self._threads is not None:
            torch.set_num_threads(self._threads)


class _Dispatch:
    """One execution of a plan's units by workers: a unit is its number in the plan, a worker how many came before."""

    def __init__(self, session: Session, workers: Processes | RayTasks, job: Job) -> None:
        self.session, self.progress, self.workers, self.job = session, session.progress, workers, job
        self.queue, self.units = Queue(job.queue), session.plan.units
        index = {id(unit): number for number, unit in enumerate(self.units)}
        needs = {index[id(unit)]: [index[id(needed)] for needed in unit.needs] for unit in self.units}
        self.order = TopologicalSorter(needs)  # finds the units whose needs are complete
        self.order.prepare()
        self.open = len(self.units)  # neither complete nor failed
        self.failures: list[str] = []
        self.entries: dict[int, Entry] = {}  # of the units in the queue, as they were last read
        self.slots: dict[int, int] = {}  # of each worker, which decides its GPUs
        self.used: set[int] = set()  # workers that have begun a unit; others may still wait for devices
        self.started = 0  # workers
        self.starts = 0  # workers that ended without a unit since one was begun
        self.waiting_since = time.monotonic()

    def run(self) -> None:
        """Execute all units that can be."""
        self.queue.folder.mkdir(parents=True)
        (self.queue.folder / "open").touch()
        try:
            self._publish()
            self.progress.opened(self.workers.describe(), self.open)
            self.progress.preparing("workers start: each loads its libraries and the base")
            with watch_sigterm() as sigterm:
                while self.entries:
                    if sigterm.asked:
                        raise Terminated(None)
                    begin = time.monotonic()
                    self._tend()
                    for number in list(self.entries):
                        self._read(number)
                    self._publish()
                    if self.entries:
                        pause(begin)
        finally:
            # End all workers; those at work may save a checkpoint first
            (self.queue.folder / "open").unlink(missing_ok=True)
            deadline, leaving = time.monotonic() + GRACE_S, self.used & self.slots.keys()
            with suppress(Exception):  # Ray may be gone
                while time.monotonic() < deadline and any(self.workers.ended(seat) is None for seat in leaving):
                    time.sleep(PAUSE_S)
            for seat in self.slots:
                self.workers.end(seat)
                self._lose(seat, "it was ended")

        # What failed, in one line
        which = "unit that needs" if self.open == 1 else "units that need"
        also = f" ({self.open} {which} it left out)" if self.open else ""
        if len(self.failures) == 1:
            raise HfpatchError(self.failures[0] + also)
        if self.failures:
            raise HfpatchError(f"{len(self.failures)} units failed{also}: {'; '.join(self.failures)}")

    def _publish(self) -> None:
        """Complete at once the ready units that take no time, and put the others into the queue."""
        while ready := self.order.get_ready():
            for number in sorted(ready):
                unit = self.units[number]
                try:
                    if self.session.is_due(unit):
                        self.entries[number] = Entry()
                        self.queue.write(number, Entry())
                        continue
                    self.session.complete(unit)
                except HfpatchError as error:
                    self._end(number, str(error))
                    self.progress.left(unit.run.name, self.open, str(error))
                else:
                    self._end(number, None)

    def _tend(self) -> None:
        """Replace workers that have ended, and start more while there are units for them."""
        for seat in list(self.slots):
            reason = self.workers.ended(seat)
            if reason is None:
                continue
            del self.slots[seat]
            self.workers.end(seat)
            self.starts += not self._lose(seat, reason)
            if self.starts >= TRIES:
                raise HfpatchError(f"workers cannot be started ({reason})")
        most = min(self.workers.most, self.open) if self.workers.most else len(self.entries)
        for slot in sorted(set(range(most)) - set(self.slots.values()))[: max(0, most - len(self.slots))]:
            self.workers.start(self.job, self.started, slot)
            self.slots[self.started] = slot
            self.started += 1
        if any(entry.node for entry in self.entries.values()):
            self.waiting_since = time.monotonic()
        elif time.monotonic() - self.waiting_since > SAY_WAITING_S:
            self.waiting_since = time.monotonic()
            self.progress.waiting("no machine has free devices for a run yet")

    def _lose(self, seat: int, reason: str) -> bool:
        """Release the unit of a worker that has ended, so that another one begins it; return whether it had one."""
        for number in self.entries:
            entry = self.queue.read(number)
            if entry is not None and entry.seat == seat and not entry.ended and not entry.waits:
                unit = self.units[number]
                remove_lost(self.session.plan.out, unit.work_lock, entry.lock)
                self.queue.write(number, entry.lost(unit.run.name, reason))
                return True
        return False

    def _read(self, number: int) -> None:
        """Read what became of a unit in the queue, and show it."""
        entry, before, unit = self.queue.read(number), self.entries[number], self.units[number]
        if entry is None or entry == before:
            return
        self.entries[number], name, shown = entry, unit.run.name, before.events
        if entry.begun > before.begun:
            self.starts, shown = 0, {}
            self.used.add(entry.seat)
            self.progress.placed(name, unit.action, entry.node)
        for event, arguments in entry.events.items():
            if event != "finished" and shown.get(event) != arguments:
                shows = [StepRecord(**value) if event == "stepped" else value for value in arguments]
                getattr(self.progress, event)(name, *shows)
        for text in entry.warnings:
            warnings.warn(text, stacklevel=2)
        if entry.ended:
            del self.entries[number]
            (self.queue.folder / f"{number}.json").unlink()
            if entry.error is None:
                self.session.record(unit)
            self._end(number, entry.error)
            self.progress.left(name, self.open, entry.error)
            for summary in entry.events.get("finished", ()):
                self.progress.finished(name, summary)
        elif entry.error is not None:
            self.progress.lost(name, entry.error)

    def _end(self, number: int, error: str | None) -> None:
        """Note that a unit is complete or has failed."""
        self.open -= 1
        if error is None:
            self.order.done(number)
        else:
            self.failures.append(error)
