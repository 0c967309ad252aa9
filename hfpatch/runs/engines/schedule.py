"""Which units of a plan are ready: a graph, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from hfpatch.runs.plan import Unit


class Schedule:
    """The units of a plan by what is left to do before them.

    Args:
        units: each after those that it needs.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._place = {id(unit): number for number, unit in enumerate(units)}
        self._needed_by: list[list[int]] = [[] for _ in units]
        self._left = [len(unit.needs) for unit in units]
        for number, unit in enumerate(units):
            for needed in unit.needs:
                self._needed_by[self.place(needed)].append(number)
        self._ready = [number for number, left in enumerate(self._left) if not left]
        self._open = len(units)

    @property
    def open(self) -> int:
        """How many units are neither complete nor dropped."""
        return self._open

    def place(self, unit: Unit) -> int:
        """Return a unit's place in the plan."""
        return self._place[id(unit)]

    def take(self) -> Unit | None:
        """Return the first unit that is ready and was not returned yet, or None."""
        if not self._ready:
            return None
        first = min(self._ready)
        self._ready.remove(first)
        return self._units[first]

    def complete(self, unit: Unit) -> None:
        """Note that a unit is complete; units that needed it alone become ready."""
        self._open -= 1
        for number in self._needed_by[self.place(unit)]:
            self._left[number] -= 1
            if not self._left[number]:
                self._ready.append(number)

    def drop(self, unit: Unit) -> list[Unit]:
        """Note that a unit cannot be completed; return the units that thereby cannot either, directly or not."""
        dropped: dict[int, None] = {}
        reached = [self.place(unit)]
        while reached:
            for number in self._needed_by[reached.pop()]:
                if number not in dropped:
                    dropped[number] = None
                    reached.append(number)
        self._open -= 1 + sum(self._left[number] >= 0 for number in dropped)
        for number in dropped:
            self._left[number] = -1  # is never ready, and counted once
        return [self._units[number] for number in sorted(dropped)]
