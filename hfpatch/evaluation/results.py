"""What an evaluation returns for each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class TaskResult:
    """The scores of one model on one task.

    Attributes:
        task: the task's name.
        n: documents scored.
        metrics: each metric's value, as lm-eval defines it.
        stderr: the standard error over documents of each metric that has one.
        primary: the metric that stands for the task in comparisons.
        higher_is_better: the direction of the primary metric.
        num_fewshot: examples before each question.
        data_sha256: hash of the scored documents, in order.
        version: the task definition's version.
        reused: requests whose answers were kept from an earlier evaluation and not scored again. It belongs to how the
            result was come by: a result is the same without it.
    """

    task: str
    n: int
    metrics: dict[str, float]
    stderr: dict[str, float]
    primary: str
    higher_is_better: bool
    num_fewshot: int
    data_sha256: str
    version: str
    reused: int = field(default=0, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the result as what JSON can hold, but for ``reused``: a resumed run ends with equal results."""
        return {name: value for name, value in asdict(self).items() if name != "reused"}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TaskResult:
        """Return the result that `to_json` wrote."""
        return cls(**value)
