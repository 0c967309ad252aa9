"""The driver of a plan's units: it completes them itself, or puts them into a queue for workers."""

from __future__ import annotations

import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from accelerate import PartialState

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.processes import Processes
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.engines.work import OPEN, PAUSE_S, Job, pause
from hfpatch.runs.locks import new_holder, remove_lost
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Entry
from hfpatch.runs.train_eval import TrainEvalSession
from hfpatch.support.environment import CPU_ONLY
from hfpatch.support.files import clear_about_writing
from hfpatch.training.interruption import Terminated, watch_sigterm
from hfpatch.training.processes import start_processes

if TYPE_CHECKING:
    from hfpatch.runs.engines.processes import ForkedWorker, WorkerProcess
    from hfpatch.runs.engines.ray import RayTasks, Task

    Worker: TypeAlias = WorkerProcess | ForkedWorker | Task

QUEUE = ".queue"
TRIES = 3
"""How often a unit is begun whose workers end before it does: chance ends one twice, hardly three times."""
GRACE_S = 8.0
"""How long workers may take to save a checkpoint when the command is interrupted: schedulers kill after ten seconds."""


@contextmanager
def open_engine(settings: EngineSettings | None, progress: Progress | None = None) -> Iterator[Engine]:
    """Yield the engine that a command asks for, with the devices of its runs; at the end release what it took.

    Raises:
        HfpatchError: if they are not there, Ray is not installed, or a launcher has started several processes.
    """
    if settings is None or settings.is_sequential:
        yield Engine()
        return
    if PartialState().num_processes > 1:
        raise HfpatchError("--jobs and --ray start processes of their own; leave out the launcher")
    with ExitStack() as stack:
        workers: Processes | RayTasks
        if settings.ray is None:
            workers = Processes(settings, stack)
        else:
            from hfpatch.runs.engines.ray import RayTasks

            if progress is not None:
                progress.preparing(f"starting or joining Ray ({settings.ray})")
            workers = RayTasks(settings, stack)
        has_device = PartialState().device.type != "cpu"
        if has_device:  # whose memory workers may be about to use: this process computes on the CPU
            os.environ[CPU_ONLY] = "true"
            stack.callback(PartialState._reset_state)
            stack.callback(os.environ.pop, CPU_ONLY)
            PartialState._reset_state()
            start_processes()
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(workers.threads)
        yield Engine(workers, measures=not has_device)


@dataclass(frozen=True)
class Engine:
    """Completes the units of a plan; their files depend neither on the engine nor on the units before them.

    Attributes:
        workers: complete the units; without them this process does, or all that a launcher started.
        measures: whether this process has the device that runs take, so that it can measure what they cost.
    """

    workers: Processes | RayTasks | None = None
    measures: bool = True

    def execute(self, session: TrainEvalSession) -> None:
        """Complete every unit: in the plan's order until one fails or, with workers, all that need none that fails.

        Raises:
            HfpatchError: if a unit fails, naming its run.
        """
        plan = session.plan
        queues = plan.out.absolute() / QUEUE / (plan.part or "all")  # the locks on the runs make them this command's
        shutil.rmtree(queues, ignore_errors=True)  # what a killed driver has left
        try:
            if self.workers is not None:
                _Dispatch(session, self.workers, queues / uuid.uuid4().hex).run()
                return
            for unit in plan.units:
                if session.complete_alone(unit):
                    session.record(unit)
        finally:
            shutil.rmtree(queues, ignore_errors=True)
            with suppress(OSError):  # others may have theirs
                queues.parent.rmdir()


@dataclass
class _Seat:
    """A worker; ``Entry.seat`` of the units that it takes is its index in ``_Dispatch.seats``."""

    worker: Worker
    slot: int  # its share of the devices
    has_begun: bool = False  # a unit
    reason: str | None = None  # how it has ended


class _Dispatch:
    """One execution of a plan by workers: ready units go into a queue, and what becomes of them is read there.

    A unit that fails is reported in the end, after all units that do not need it. One whose worker ends before it does
    waits again, for a worker that continues from its checkpoint. No worker takes the slot of one that ended before it
    began a unit. Units are called by their numbers in the plan.
    """

    def __init__(self, session: TrainEvalSession, workers: Processes | RayTasks, queue: Path) -> None:
        self.session, self.progress, self.workers, self.queue = session, session.progress, workers, queue
        self.job = Job(session.plan, queue, new_holder(), Path.cwd(), workers.threads, workers.settings)
        self.units = session.plan.units
        index = {id(unit): number for number, unit in enumerate(self.units)}
        needs = {index[id(unit)]: [index[id(needed)] for needed in unit.needs] for unit in self.units}
        self.order = TopologicalSorter(needs)  # finds the units whose needs are complete
        self.order.prepare()
        self.open = len(self.units)  # neither complete nor failed
        self.failures: list[str] = []
        self.entries: dict[int, Entry] = {}  # of the units in the queue, as they were last read
        self.seats: list[_Seat] = []
        self.slots = list(range(workers.most or self.open))  # for more workers

    def run(self) -> None:
        """Complete all units that can be."""
        with clear_about_writing(self.queue):
            self.queue.mkdir(parents=True)
            (self.queue / OPEN).touch()
        try:
            self._publish()
            self.progress.opened(self.workers.description, self.open)
            with watch_sigterm() as sigterm:
                while self.entries:
                    if sigterm.asked:
                        raise Terminated(None)
                    begin = time.monotonic()
                    ended = self._ended()
                    for number in list(self.entries):
                        self._read(number)
                    self._publish()
                    self._start(ended)
                    pause(begin)
        finally:
            # End all workers; those at work may save a checkpoint first
            (self.queue / OPEN).unlink(missing_ok=True)
            deadline, at_work = time.monotonic() + GRACE_S, {entry.seat for entry in self.entries.values()}
            leaving = [seat.worker for number, seat in enumerate(self.seats) if number in at_work]
            with suppress(Exception, KeyboardInterrupt):  # Ray may be gone; whoever interrupts twice does not wait
                while time.monotonic() < deadline and any(worker.ended() is None for worker in leaving):
                    time.sleep(PAUSE_S)
            for seat in self._taken():
                seat.worker.end()
            for number in self.entries:
                if (entry := Entry.find(self.queue / f"{number}.json")) is not None:  # perhaps begun since
                    remove_lost(self.session.plan.out, self.units[number].work_lock, entry.lock)

        # What failed, in one line
        which = "unit that needs" if self.open == 1 else "units that need"
        also = f" ({self.open} {which} it left out)" if self.open else ""
        if len(self.failures) > 1:
            raise HfpatchError(f"{len(self.failures)} units failed{also}: {'; '.join(self.failures)}")
        if self.failures:
            raise HfpatchError(self.failures[0] + also)

    def _publish(self) -> None:
        """Complete at once the ready units that take no time, and put the others into the queue."""
        while ready := self.order.get_ready():
            for number in sorted(ready):
                unit, error = self.units[number], None
                try:
                    if self.session.is_due(unit):
                        self.entries[number] = Entry()
                        self.entries[number].write(self.queue / f"{number}.json")
                        continue
                    self.session.complete(unit)
                except HfpatchError as problem:
                    error = str(problem)
                self._end(number, error)

    def _taken(self) -> list[_Seat]:
        """Return the workers that have not ended."""
        return [seat for seat in self.seats if seat.reason is None]

    def _ended(self) -> list[_Seat]:
        """Return the workers that have ended since the last call."""
        taken = self._taken()
        for seat in taken:
            if (reason := seat.worker.ended()) is not None:
                seat.worker.end()
                seat.reason = reason
        return [seat for seat in taken if seat.reason is not None]

    def _start(self, ended: list[_Seat]) -> None:
        """Start workers while there are units and slots for them.

        Raises:
            HfpatchError: if none is left, and the last ones ended before they began a unit.
        """
        self.slots += [seat.slot for seat in ended if seat.has_begun]
        if failed := [seat.reason for seat in ended if not seat.has_begun]:
            if self.entries and not self._taken() and not self.slots:
                raise HfpatchError(f"workers cannot be started ({failed[-1]})")
            warnings.warn(f"fewer workers are left: one ended before it began a run ({failed[-1]})", stacklevel=2)
        while self.slots and len(self._taken()) < (self.open if self.workers.most else len(self.entries)):
            slot = self.slots.pop(0)
            self.seats.append(_Seat(self.workers.start(self.job, len(self.seats), slot), slot))
            if all(entry.waits for entry in self.entries.values()):
                self.progress.preparing("workers start: each loads its libraries and the base, once it has its devices")

    def _read(self, number: int) -> None:
        """Read what became of a unit in the queue, show it, and let the unit wait again if its worker has ended."""
        file, unit, before = self.queue / f"{number}.json", self.units[number], self.entries[number]
        entry, name, shown = Entry.find(file) or before, unit.run.name, before.events
        self.entries[number] = entry
        if entry.attempts > before.attempts:
            shown = {}
            self.seats[entry.seat].has_begun = True
            self.progress.placed(name, unit.action, entry.node)
        if not (entry.ended or entry.waits) and (reason := self.seats[entry.seat].reason) is not None:
            remove_lost(self.session.plan.out, unit.work_lock, entry.lock)
            if entry.attempts == TRIES:
                self._end(number, f"{name}: its worker ended {TRIES} times before it did ({reason})")
            else:
                self.entries[number] = Entry(attempts=entry.attempts)
                self.entries[number].write(file)
                self.progress.lost(name, reason)
            return
        for event, arguments in entry.events.items():
            if shown.get(event) != arguments:
                getattr(self.progress, event)(name, *arguments)
        if entry.ended:
            for text in entry.warnings:
                warnings.warn(text, stacklevel=2)
            if entry.error is None:
                self.session.record(unit)
            self._end(number, entry.error)

    def _end(self, number: int, error: str | None) -> None:
        """Note that a unit is complete or has failed."""
        self.open -= 1
        self.entries.pop(number, None)
        (self.queue / f"{number}.json").unlink(missing_ok=True)
        if error is None:
            self.order.done(number)
        else:
            self.failures.append(error)
        self.progress.left(self.units[number].run.name, self.open, error)
