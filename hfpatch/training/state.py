"""What a run has found out so far besides its weights: kept in every checkpoint, so that a resumed run knows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hfpatch.nn.matmul import MatmulLibrary


@dataclass
class LoopState:
    """Counts and decisions of a run.

    Attributes:
        survival: the counts of :class:`hfpatch.training.survival.UpdateSurvival`: group -> (changed, with gradient).
        skipped: steps whose update was left out because of a loss or a gradient that was not finite.
        best_loss: the lowest evaluation loss, or None before the first evaluation.
        best_step: the step after which it was measured.
        waited: evaluations since then.
        stopped: whether early stopping has ended the run.
        diverged_step: the step at which the run diverged, which ended it, or None.
        matmul: the library of the matrix products on the CPU, which a resumed run keeps; None before the first step.
    """

    survival: dict[str, tuple[int, int]] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    best_loss: float | None = None
    best_step: int | None = None
    waited: int = 0
    stopped: bool = False
    diverged_step: int | None = None
    matmul: MatmulLibrary | None = None

    @property
    def ended_early(self) -> bool:
        """Whether something has ended the run before its plan did."""
        return self.stopped or self.diverged_step is not None

    def evaluated(self, step: int, loss: float, patience: int | None) -> bool:
        """Take note of an evaluation; return whether it is the best so far."""
        better = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if better:
            self.best_loss, self.best_step, self.waited = loss, step, 0
        else:
            self.waited += 1
        self.stopped = patience is not None and self.waited >= patience
        return better

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LoopState:
        """Read a state back."""
        survival = {group: (changed, moved) for group, (changed, moved) in value["survival"].items()}
        return cls(**{**value, "survival": survival})
