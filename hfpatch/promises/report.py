"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """One promise: its name, whether it holds, and what was seen."""

    promise: str
    holds: bool
    seen: str


@dataclass(frozen=True)
class CheckReport:
    """The verdicts on one model and one configuration; ``str()`` is a table.

    Args:
        model: name of the model.
        method: the configuration's class.
        changed: how many blocks the method changes.
        left_out: the blocks that it leaves out, by index, with the reason.
        verdicts: one for each promise.
    """

    model: str
    method: str
    changed: int
    left_out: dict[int, str]
    verdicts: list[Verdict]

    @property
    def passed(self) -> bool:
        """Whether every promise holds."""
        return all(verdict.holds for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        width = max(len(verdict.promise) for verdict in self.verdicts)
        where = f"{self.changed} blocks" + (f", {len(self.left_out)} left out" if self.left_out else "")
        lines = [f"{self.model}: {self.method} in {where}"]
        lines += [f"  {'ok  ' if v.holds else 'FAIL'}  {v.promise:<{width}}  {v.seen}" for v in self.verdicts]
        return "\n".join(lines)
