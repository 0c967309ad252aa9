"""What every engine has in common, and the one that works in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hfpatch.runs.locks import Holder
from hfpatch.runs.plan import Plan, Unit
from hfpatch.runs.progress import Progress

Record: TypeAlias = Callable[[Unit], None]


@dataclass(frozen=True)
class Session:
    """What one command does on a folder, after it has locked, checked and set up its runs.

    Attributes:
        plan: the units.
        complete: brings a unit to its end in this process, doing only what is not done yet.
        is_due: whether a unit is one that takes time, judged once the units that it needs are complete.
        record: writes what the folder's results say; called after each unit that took time.
        steps: how many steps a unit trains.
        progress: what is shown.
    """

    plan: Plan
    complete: Callable[[Unit], None]
    is_due: Callable[[Unit], bool]
    record: Record
    steps: Callable[[Unit], int]
    progress: Progress


class Engine(ABC):
    """Executes the units of a plan in an order that their ``needs`` allow.

    What a unit writes does not depend on the engine, nor on which other units were executed before it.

    Attributes:
        holder: what the locks name as their holder, where workers borrow them.
    """

    holder: Holder | None = None

    @abstractmethod
    def connect(self) -> None:
        """Find the devices that the runs ask for, before anything is written.

        Raises:
            HfpatchError: if they are not there.
        """

    @property
    @abstractmethod
    def at_once(self) -> int:
        """How many runs are worked on at a time, known once it is connected."""

    @abstractmethod
    def execute(self, session: Session) -> None:
        """Bring every unit of a plan to its end.

        Raises:
            HfpatchError: if a unit fails, naming its run.
        """

    @abstractmethod
    def close(self) -> None:
        """End what `connect` and `execute` started; called whatever happened."""


class Sequential(Engine):
    """Executes units in the plan's order in this process; in several, if a launcher started them, each on all of them.

    It ends with the first unit that fails.
    """

    def connect(self) -> None:
        """Do nothing."""

    @property
    def at_once(self) -> int:
        """One."""
        return 1

    def execute(self, session: Session) -> None:
        """Bring one unit after the other to its end."""
        for unit in session.plan.units:
            due = session.is_due(unit)
            session.complete(unit)
            if due:
                session.record(unit)

    def close(self) -> None:
        """Do nothing."""
