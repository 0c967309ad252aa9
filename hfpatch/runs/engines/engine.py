"""Engines execute the units of a plan: `Engine` in this process, `Parallel` in workers, whose interface is here."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from hfpatch.runs.engines.job import Job, Outcome, Place
from hfpatch.runs.locks import Holder
from hfpatch.runs.plan import Unit
from hfpatch.runs.session import Session


class Engine:
    """Executes the units of a plan: here in the plan's order, in this process, ending with the first that fails.

    In several processes, if a launcher started them, each unit is shared by all of them. `Parallel` executes several
    units at a time. The files of a unit depend neither on the engine nor on the units before it.

    Attributes:
        holder: the holder that the locks name, where workers borrow them.
        at_once: how many runs are worked on at a time, known once it is connected.
    """

    holder: Holder | None = None
    at_once = 1

    def connect(self) -> None:
        """Find the devices that the runs ask for, before anything is written.

        Raises:
            HfpatchError: if they are not there.
        """

    def execute(self, session: Session) -> None:
        """Complete every unit of a plan.

        Raises:
            HfpatchError: if a unit fails, naming its run.
        """
        for unit in session.plan.units:
            due = session.is_due(unit)
            session.complete(unit)
            if due:
                session.record(unit)

    def close(self) -> None:
        """End everything that `connect` and `execute` started; also called after an error."""


class Worker(Protocol):
    """A process, perhaps on another machine, that works on one unit at a time.

    The futures raise if the process has ended, and for no other reason.

    Attributes:
        place: where it is, known once its devices are free for it.
    """

    place: Future[Place]

    def submit(self, unit: Unit) -> Future[Outcome]:
        """Let it work on a unit."""

    def terminate(self) -> None:
        """Ask it to save a checkpoint and end, as far as it can be asked."""

    def kill(self) -> None:
        """End it at once; without effect if it has ended."""

    def leave(self) -> None:
        """Let it end, as it has nothing to do any longer."""
        self.kill()


class Workers(Protocol):
    """Makes workers.

    Attributes:
        threads: torch's threads of each process, known once it is connected.
    """

    threads: int

    def connect(self) -> None:
        """Find the devices that the runs ask for.

        Raises:
            HfpatchError: if they are not there.
        """

    def check(self, job: Job) -> None:
        """Check what workers on other machines need, after the run folder was written and before the first of them.

        Raises:
            HfpatchError: if something is missing.
        """
        return

    def room(self) -> int:
        """Return how many workers there may be at a time; it may change with the machines."""

    def make(self, job: Job, number: int) -> Worker:
        """Make a worker in place ``number``, counted from 0, and start it; there is no other in it."""

    def describe(self) -> str:
        """Return where and how many runs are worked on at a time."""

    def close(self) -> None:
        """Close everything that `connect` opened; all workers have ended."""
        return
