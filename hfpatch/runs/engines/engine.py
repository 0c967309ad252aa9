"""What every engine has in common, and the one that works in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hfpatch.runs.locks import Holder
from hfpatch.runs.session import Session


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
    def execute(self, session: Session[Any]) -> None:
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

    def execute(self, session: Session[Any]) -> None:
        """Bring one unit after the other to its end."""
        for unit in session.plan.units:
            due = session.is_due(unit)
            session.complete(unit)
            if due:
                session.record(unit)

    def close(self) -> None:
        """Do nothing."""
