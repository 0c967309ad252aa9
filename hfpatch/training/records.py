"""What a run writes down: a line a step, and the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.training.lines import JsonLines, as_json
from hfpatch.training.state import LoopState


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl.

    A pretraining run's first line is of step 0, before any update: an ``eval_loss``, no ``loss``.

    Attributes:
        step: the optimiser step, from 1.
        loss: nats per predicted token of the step's batch, before the update; left out of the file if not finite.
        lr: the learning rate that the update used.
        tokens: tokens of the step's batch, padding not counted.
        seconds: duration of the step; evaluation and checkpoints not counted.
        eval_loss: nats per token on the evaluation blocks after the update, where it was measured.
        skipped: True where the update was left out because loss or gradient were not finite.
    """

    step: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    eval_loss: float | None = None
    skipped: bool | None = None


@dataclass(frozen=True)
class TrainResult:
    """What a finished run reports.

    Attributes:
        steps: optimiser steps, the one at which a run diverged included.
        final_loss: the last finite loss of a step, in nats per token.
        tokens: tokens seen, padding not counted.
        wall_s: seconds of all steps together, those before a resumption included.
        tokens_per_s: ``tokens / wall_s``.
        peak_memory_bytes: CUDA's peak, or the process's resident peak; of the last session only.
        update_survival: share of weights that an optimiser step really changed, by group and for ``all``;
            see :class:`hfpatch.training.survival.UpdateSurvival`.
        final_eval_loss: nats per token on the evaluation blocks at the end, where there are any.
        best_eval_loss: the lowest of all evaluations, where there were any.
        best_step: the step after which it was measured.
        skipped_steps: how many updates were left out because loss or gradient were not finite.
        stopped_early: whether early stopping ended the run before the plan did.
        diverged_step: the step that ended a run which diverged: its loss or gradient was not finite, or its loss or
            that of the evaluation blocks after it was above pretraining's bound. Its update was left out unless the
            loss after it said so.
        mfu: the share of the measured rate of a large matrix product that the steps reached; a lower bound, see
            :func:`hfpatch.training.throughput.flops_per_token`.
        matmul: the library of the matrix products on the CPU, see :mod:`hfpatch.nn.matmul`.
    """

    steps: int
    final_loss: float
    tokens: int
    wall_s: float
    tokens_per_s: float
    peak_memory_bytes: int
    update_survival: dict[str, float]
    final_eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None
    skipped_steps: int = 0
    stopped_early: bool = False
    diverged_step: int | None = None
    mfu: float | None = None
    matmul: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; a loss that is not finite is null."""
        return as_json(asdict(self))


def summarise(
    records: Sequence[StepRecord],
    *,
    peak_memory_bytes: int,
    update_survival: dict[str, float],
    state: LoopState | None = None,
    speed_limit: float | None = None,
) -> TrainResult:
    """Add up a run's records; ``speed_limit`` is the machine's, in tokens a second."""
    state = state or LoopState()
    tokens = sum(record.tokens for record in records)
    wall_s = sum(record.seconds for record in records)
    return TrainResult(
        steps=records[-1].step,
        final_loss=next((record.loss for record in reversed(records) if math.isfinite(record.loss)), math.nan),
        tokens=tokens,
        wall_s=wall_s,
        tokens_per_s=tokens / wall_s,
        peak_memory_bytes=peak_memory_bytes,
        update_survival=update_survival,
        final_eval_loss=records[-1].eval_loss,
        best_eval_loss=state.best_loss,
        best_step=state.best_step,
        skipped_steps=len(state.skipped),
        stopped_early=state.stopped,
        diverged_step=state.diverged_step,
        mfu=tokens / wall_s / speed_limit if speed_limit else None,
        matmul=state.matmul,
    )


class MetricsFile(JsonLines):
    """metrics.jsonl: one line a step, written as it comes."""

    def append(self, record: StepRecord) -> None:
        """Write one line and flush it."""
        self.write([{name: value for name, value in as_json(asdict(record)).items() if value is not None}])

    def read(self) -> list[StepRecord]:
        """Return all whole lines; a last line that a crash cut off is left out.

        Raises:
            HfpatchError: if a line is damaged.
        """
        records = []
        for number, value in enumerate(self.values(), start=1):
            try:
                records.append(StepRecord(**{"loss": math.nan, **value}))
            except TypeError as error:
                raise self.damaged(number) from error
        return records

    def truncate(self, step: int) -> None:
        """Drop what was written after ``step``; before the first step, everything.

        Raises:
            HfpatchError: if a line up to ``step`` is missing or damaged.
        """
        steps = [value["step"] for value in self.values_until(step) if value["step"]]
        if steps != list(range(1, step + 1)):
            raise HfpatchError(
                f"{self.path}: lines up to step {step} are missing or damaged; delete the run and start again"
            )
        self.keep(step)
