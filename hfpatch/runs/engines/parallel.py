"""The loop that keeps workers busy: ready units to free workers, wait for any, and again."""

from __future__ import annotations

import os
import time
import warnings
from bisect import insort
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.engine import Engine
from hfpatch.runs.engines.job import Job, Outcome, Place
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.engines.worker import Scored, read_scored
from hfpatch.runs.locks import Holder, new_holder, take_back
from hfpatch.runs.plan import MEASURING, Unit, training_steps
from hfpatch.runs.progress import Progress
from hfpatch.runs.session import Session
from hfpatch.training.interruption import Terminated, watch_sigterm
from hfpatch.training.processes import CPU_ONLY, start_processes
from hfpatch.training.records import MetricsFile

if TYPE_CHECKING:
    from hfpatch.runs.engines.processes import Process, Processes
    from hfpatch.runs.engines.ray import Actor, RayWorkers

TRIES = 3
"""How often a unit is begun whose workers end before it does."""
GRACE_S = 8.0
"""How long workers may take to save a checkpoint when the command is interrupted."""
SAY_WAITING_S = 60.0
"""How often it is said that there is no worker yet."""
POLL_S = 1.0
"""How often the progress of runs is read."""
LOOKS = 32
"""For how many runs at a time, as a shared file system is slow."""


@dataclass(eq=False)
class Parallel(Engine):
    """Executes several units at a time, each in a worker process; this process only collects their results.

    A unit that fails is reported in the end, after all units that do not need it. One whose worker ends before it
    does is given to another one, which continues from its checkpoint.

    Args:
        workers: where workers come from; both kinds, and both kinds of worker, have the same methods.
        settings: the options of the command.
    """

    workers: Processes | RayWorkers
    settings: EngineSettings
    holder: Holder | None = field(default_factory=new_holder, init=False)
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
        plan: Any = session.plan
        job = Job(
            recipe=plan.recipe,
            out=plan.out.absolute(),
            part=plan.part,
            holder=self.holder or {},
            folder=Path.cwd(),
            threads=self.workers.threads,
            processes=self.settings.processes,
            launch_config=self.settings.launch_config,
        )
        self.workers.check(job)
        _Dispatch(session, self.workers, job).run()

    def close(self) -> None:
        """Release everything that `connect` took."""
        self.workers.close()
        if self._cpu_only is not None:
            os.environ.pop(CPU_ONLY)
            PartialState._reset_state()
        if self._threads is not None:
            torch.set_num_threads(self._threads)


@dataclass
class _Seat:
    """A place for a worker, with the worker, its machine and its unit."""

    number: int
    worker: Process | Actor
    future: Future[Any]
    node: str = ""
    unit: Unit | None = None
    started: bool = False


class _Dispatch:
    """One execution of a plan's units by workers.

    Attributes:
        place: a unit's place in the plan, by its id.
        needs: the places that each place needs.
        order: finds the places that are ready, as all that they need are complete.
        completed: how many units are complete.
        left_out: the places of failed units and of all units that need one of them.
        queue: the places that are ready for a worker, in the plan's order.
        begun: how often a worker began with a unit, by its id.
        starts: workers that could not be started, since one was.
    """

    def __init__(self, session: Session, workers: Processes | RayWorkers, job: Job) -> None:
        self.session, self.workers, self.job = session, workers, job
        self.units = session.plan.units
        self.place = {id(unit): number for number, unit in enumerate(self.units)}
        self.needs = [[self.place[id(needed)] for needed in unit.needs] for unit in self.units]
        self.order = TopologicalSorter(dict(enumerate(self.needs)))
        self.order.prepare()
        self.completed, self.left_out = 0, set[int]()
        self.queue: list[int] = []
        self.seats: list[_Seat] = []
        self.begun: Counter[int] = Counter()
        self.starts = 0
        self.failures: list[str] = []
        self.said: set[str] = set()
        self.seen: dict[int, int | Scored] = {}
        self.looked = 0
        self.waiting_since = time.monotonic()

    @property
    def open(self) -> int:
        """How many units are neither complete nor left out."""
        return len(self.units) - self.completed - len(self.left_out)

    def run(self) -> None:
        """Execute all units that can be."""
        self._sort()
        self.session.progress.opened(self.workers.describe(), self.open)
        self.session.progress.preparing("workers start: each loads its libraries and the base")
        try:
            with watch_sigterm() as sigterm:
                while self.open:
                    if sigterm.asked:
                        raise Terminated(None)
                    self._assign()
                    # Wait for one of the workers, or until it is time to look at the progress
                    busy = [seat for seat in self.seats if seat.unit is not None or not seat.started]
                    done, _ = wait([seat.future for seat in busy], timeout=POLL_S, return_when=FIRST_COMPLETED)
                    for seat in busy:
                        if seat.future in done:
                            self._take_note(seat)
                    if any(seat.started for seat in self.seats):
                        self.waiting_since = time.monotonic()
                    elif time.monotonic() - self.waiting_since > SAY_WAITING_S:
                        self.waiting_since = time.monotonic()
                        self.session.progress.waiting("no machine has free devices for a run yet")
                    self._sort()
                    self._show_progress()
        finally:
            # End all workers; those at work may save a checkpoint first
            idle = [seat for seat in self.seats if seat.started and seat.unit is None]
            others = [seat for seat in self.seats if seat not in idle]
            for seat in others:
                seat.worker.terminate()
            for seat in idle:
                seat.worker.leave()
            wait([seat.future for seat in others if seat.unit is not None], timeout=GRACE_S)
            for seat in others:
                seat.worker.kill()
                if seat.unit is not None:
                    take_back(self.session.plan.out, seat.unit.run.lock, self.job.holder)

        # What failed, in one line
        needing = len(self.left_out) - len(self.failures)
        which = "unit that needs" if needing == 1 else "units that need"
        also = f" ({needing} {which} it left out)" if needing else ""
        if len(self.failures) == 1:
            raise HfpatchError(self.failures[0] + also)
        if self.failures:
            raise HfpatchError(f"{len(self.failures)} units failed{also}: {'; '.join(self.failures)}")

    def _sort(self) -> None:
        """Complete at once the units that take no time, and queue the others that are ready."""
        while ready := self.order.get_ready():
            for number in sorted(ready):
                unit = self.units[number]
                try:
                    if self.session.is_due(unit):
                        insort(self.queue, number)
                        continue
                    self.session.complete(unit)
                except HfpatchError as error:
                    self._fail(unit, str(error))
                else:
                    self.completed += 1
                    self.order.done(number)

    def _assign(self) -> None:
        """Give units to free workers, and start more workers where there is room for them."""
        free = [seat for seat in self.seats if seat.started and seat.unit is None]
        starting = sum(not seat.started for seat in self.seats)
        wanted = len(self.queue) - len(free) - starting
        taken = {seat.number for seat in self.seats}
        open_seats = [number for number in range(self.workers.room()) if number not in taken]
        for number in open_seats[: max(0, wanted)]:
            worker = self.workers.make(self.job, number)
            self.seats.append(_Seat(number, worker, worker.place))
        for seat in free[: len(self.queue)]:
            unit = seat.unit = self.units[self.queue.pop(0)]
            self.begun[id(unit)] += 1
            run, marker = replace(unit.run, folder=unit.run.folder.absolute()), unit.marker and unit.marker.absolute()
            seat.future = seat.worker.submit(replace(unit, run=run, marker=marker, needs=()))
            self.session.progress.placed(unit.run.name, unit.action, seat.node)
            if unit.action in MEASURING:
                self.session.progress.evaluating(unit.run.name, "evaluation")
            else:
                self.session.progress.started(unit.run.name, training_steps(self.session.setup.recipe, unit) or 0)

    def _take_note(self, seat: _Seat) -> None:
        """Note the result of a start or of a unit."""
        error = seat.future.exception()
        if error is not None:
            self._replace(seat, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            return
        result = seat.future.result()
        if isinstance(result, Place):
            seat.started, seat.node = True, f"{result.node}:{result.pid}"
            self.starts = 0
            return
        outcome: Outcome = result
        unit, seat.unit = seat.unit, None
        assert unit is not None
        for text in outcome.warnings:
            if text not in self.said:
                self.said.add(text)
                warnings.warn(text, stacklevel=2)
        if outcome.ended is not None:
            seat.unit = unit
            self._replace(seat, outcome.ended)
        elif outcome.error is not None:
            self._fail(unit, outcome.error)
        else:
            self.completed += 1
            self.order.done(self.place[id(unit)])
            self.session.record(unit)
            self.session.progress.left(unit.run.name, self.open)
            if outcome.summary is not None:
                self.session.progress.finished(unit.run.name, outcome.summary)

    def _replace(self, seat: _Seat, reason: str) -> None:
        """Remove a worker that has ended; another one continues its unit from the checkpoint."""
        seat.worker.kill()
        self.seats.remove(seat)
        unit = seat.unit
        if unit is None:
            self.starts += 1
            if self.starts >= TRIES:
                raise HfpatchError(f"workers cannot be started ({reason})")
            return
        take_back(self.session.plan.out, unit.run.lock, self.job.holder)
        if self.begun[id(unit)] >= TRIES:
            self._fail(unit, f"{unit.run.name}: its worker ended {TRIES} times before it did ({reason})")
        else:
            insort(self.queue, self.place[id(unit)])
            self.session.progress.lost(unit.run.name, reason)

    def _fail(self, unit: Unit, message: str) -> None:
        """Leave out a unit that failed, and all that need it, directly or not."""
        self.failures.append(message)
        self.left_out.add(self.place[id(unit)])
        for number, needs in enumerate(self.needs):  # each comes after what it needs
            if not self.left_out.isdisjoint(needs):
                self.left_out.add(number)
        self.session.progress.left(unit.run.name, self.open, message)

    def _show_progress(self) -> None:
        """Show the progress of running units as their folders have it, of some units at a time."""
        units = [seat.unit for seat in self.seats if seat.unit is not None]
        first = self.looked % max(1, len(units))
        chosen = [*units[first:], *units[:first]][:LOOKS]
        self.looked = first + len(chosen)
        for unit in chosen:
            name, known = unit.run.name, self.seen.get(id(unit))
            if unit.action in MEASURING:
                scored = read_scored(unit.run.folder)
                if scored is not None and scored != known:
                    self.seen[id(unit)] = scored
                    self.session.progress.scored(name, *scored)
            else:
                record = MetricsFile(unit.run.folder / "metrics.jsonl").last()
                if record is not None and record.step != known:
                    self.seen[id(unit)] = record.step
                    self.session.progress.stepped(name, record)
