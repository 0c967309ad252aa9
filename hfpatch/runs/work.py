"""`Work`: the units of a plan and how each is brought to its end, as commands, engines and workers share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from hfpatch.data.plan import BatchPlan
from hfpatch.nn.matmul import MatmulLibrary
from hfpatch.runs.identity import Identity
from hfpatch.runs.plan import Plan, PlannedRun, Unit
from hfpatch.runs.progress import Progress
from hfpatch.runs.throttle import Throttled


class Setup(Protocol):
    """What all runs of a folder share, loaded and checked before the first of them."""

    @property
    def shared(self) -> Identity:
        """The identity that all runs share."""

    @property
    def plans(self) -> Mapping[int, BatchPlan]:
        """The batch plan of each seed."""

    @property
    def matmul(self) -> MatmulLibrary | None:
        """The library for matrix products that all runs share; None where each run chooses for itself."""

    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of one run."""

    def identify_scores(self) -> Mapping[str, Mapping[str, str]]:
        """Return what scores are of, by task; takes as long as building all prompts."""


AnySetup = TypeVar("AnySetup", bound=Setup)


class Work(ABC, Generic[AnySetup]):
    """The units of a plan, and how each is brought to its end.

    Args:
        plan: the units.
        progress: what is shown; None shows nothing.

    Attributes:
        setup: what all runs share, once `set_up` has loaded it.
        throttle: writes results.json now and then while runs finish.
    """

    setup: AnySetup

    def __init__(self, plan: Plan, progress: Progress | None = None) -> None:
        self.plan, self.progress = plan, progress or Progress()
        self.throttle = Throttled()

    @abstractmethod
    def set_up(self) -> None:
        """Load what all runs share and check it, so that a mistake shows before any training.

        Raises:
            HfpatchError: if something cannot be loaded or used.
        """

    @abstractmethod
    def complete(self, unit: Unit) -> None:
        """Bring a unit to its end in this process, doing only what is not done yet.

        Raises:
            HfpatchError: if it fails, naming the run.
        """

    @abstractmethod
    def steps(self, unit: Unit) -> int:
        """Return how many steps a unit trains."""

    @abstractmethod
    def write_results(self, *, complete: bool = False) -> None:
        """Write results.json, of the runs that are complete so far; of several processes the first does.

        Args:
            complete: whether these are all runs.
        """

    def is_due(self, unit: Unit) -> bool:
        """Return whether completing a unit takes time; the units that it needs are complete."""
        return not unit.is_complete()

    def record(self, unit: Unit) -> None:
        """Note that a unit that took time is complete."""
        self.throttle(self.write_results)
