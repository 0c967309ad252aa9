"""Engines execute the units of a plan: `Engine` in this process, `Parallel` in workers."""

from __future__ import annotations

from hfpatch.runs.locks import Holder
from hfpatch.runs.progress import Progress
from hfpatch.runs.session import Session


class Engine:
    """Executes the units of a plan: here in the plan's order, in this process, ending with the first that fails.

    In several processes, if a launcher started them, each unit is shared by all of them. `Parallel` executes several
    units at a time. The files of a unit depend neither on the engine nor on the units before it.

    Attributes:
        holder: the holder that the locks name, where workers borrow them.
        at_once: how many runs are worked on at a time, known once it is connected.
        measures: whether this process has the device that runs take, so that it can measure what they cost.
    """

    holder: Holder | None = None
    at_once = 1
    measures = True

    def connect(self, progress: Progress | None = None) -> None:
        """Find the devices that the runs ask for, before anything is written.

        Args:
            progress: called where that takes long.

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
