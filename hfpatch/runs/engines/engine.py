"""What every engine has in common, and how it works in this process alone."""

from __future__ import annotations

from hfpatch.runs.locks import Holder
from hfpatch.runs.session import Session


class Engine:
    """Executes the units of a plan: here in the plan's order, in this process, ending with the first that fails.

    In several processes, if a launcher started them, each unit is shared by all of them. `Parallel` executes several
    units at a time. What a unit writes does not depend on the engine, nor on which units were executed before it.

    Attributes:
        holder: what the locks name as their holder, where workers borrow them.
    """

    holder: Holder | None = None

    def connect(self) -> None:
        """Find the devices that the runs ask for, before anything is written.

        Raises:
            HfpatchError: if they are not there.
        """

    @property
    def at_once(self) -> int:
        """How many runs are worked on at a time, known once it is connected."""
        return 1

    def execute(self, session: Session) -> None:
        """Bring every unit of a plan to its end.

        Raises:
            HfpatchError: if a unit fails, naming its run.
        """
        for unit in session.plan.units:
            due = session.is_due(unit)
            session.complete(unit)
            if due:
                session.record(unit)

    def close(self) -> None:
        """End what `connect` and `execute` started; called whatever happened."""
