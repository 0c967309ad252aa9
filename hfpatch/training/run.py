"""One run: its fixed parts and what it has done so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.plan import BatchPlan
from hfpatch.recipes.training import NOT_IDENTITY, LoopSettings
from hfpatch.training.checkpoint import Checkpoint
from hfpatch.training.diagnostics import DiagnosticsFile
from hfpatch.training.records import MetricsFile, StepRecord
from hfpatch.training.state import LoopState


@dataclass
class Run:
    """One run's fixed parts and what it has done so far.

    Attributes:
        settings: the recipe's section.
        blocks: the training blocks.
        plan: which blocks each step sees.
        seed: the run's seed.
        folder: the run folder; holds metrics.jsonl and checkpoints/.
        origin: hashes of what else a resumed run must share, such as the frozen base and the method's settings.
        held_out: the blocks whose loss is measured, or None.
        on_step: called with each step's record, on the main process.
        measure_survival: whether to measure update survival.
        on_bad_loss: what a loss or gradient that is not finite does: stop with an error, skip the update, or end the
            run and record it as diverged.
        diverged_above: with ``record``, the loss above which a run has diverged once warm-up is over, or None.
        evaluate_at_start: whether to measure the loss of the held-out blocks before the first step too.
        diagnose_every: measure the query paths every so many steps, at the start and at the end; None never does.
        checkpoint: where it resumes from, or None.
        records: the records so far.
        state: what else it knows so far.
    """

    settings: LoopSettings
    blocks: TokenBlocks
    plan: BatchPlan
    seed: int
    folder: Path
    origin: Mapping[str, str | None] = field(default_factory=dict)
    held_out: TokenBlocks | None = None
    on_step: Callable[[StepRecord], None] | None = None
    measure_survival: bool = True
    on_bad_loss: Literal["stop", "skip", "record"] = "stop"
    diverged_above: float | None = None
    evaluate_at_start: bool = False
    diagnose_every: int | None = None
    checkpoint: Checkpoint | None = None
    records: list[StepRecord] = field(default_factory=list)
    state: LoopState = field(default_factory=LoopState)

    @property
    def start(self) -> int:
        """Steps done before this session."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> MetricsFile:
        """The file of the records."""
        return MetricsFile(self.folder / "metrics.jsonl")

    @property
    def diagnostics(self) -> DiagnosticsFile:
        """The file of the diagnostics."""
        return DiagnosticsFile(self.folder / "diagnostics.jsonl")

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the checkpoint; memory, saving and processes may differ."""
        settings = self.settings.model_dump(mode="json", exclude=set(NOT_IDENTITY))
        held_out = self.held_out.sha256 if self.held_out else None
        return {
            "settings": settings,
            "seed": self.seed,
            "data": self.blocks.sha256,
            "batch plan": self.plan.sha256,
            "evaluation data": held_out,
            "origin": dict(self.origin),
        }

    def evaluates_after(self, step: int) -> bool:
        """Whether the evaluation loss is due after ``step`` steps, 0 meaning before the first."""
        if self.held_out is None or self.state.diverged_step is not None:
            return False
        return self._is_due(step, self.settings.evaluate_every) if step else self.evaluate_at_start

    def diagnoses_after(self, step: int) -> bool:
        """Whether diagnostics are due after ``step`` steps; at 0 and at the end they always are."""
        if self.diagnose_every is None:
            return False
        return self.state.ended_early or self._is_due(step, self.diagnose_every)

    def diagnosed_steps(self) -> set[int]:
        """Return the steps whose diagnostics a run must have written that has come as far as ``start``."""
        if self.diagnose_every is None or not self.start:
            return set()
        last = {self.start} if self.is_finished() else set()
        return {*range(0, self.start + 1, self.diagnose_every), *last}

    def diverges(self, step: int, loss: float) -> bool:
        """Whether a loss of step ``step`` ends the run as diverged.

        The bound holds after warm-up only: an untrained model's loss lies about ln V, just below the least possible
        bound, and a spike while the learning rate still rises often passes.
        """
        if self.on_bad_loss != "record":
            return False
        bound = self.diverged_above if step > self.settings.warmup_steps else None
        return not math.isfinite(loss) or (bound is not None and loss > bound)

    def saves_after(self, step: int, *, best: bool) -> bool:
        """Whether a checkpoint is due after ``step`` steps, the last evaluation having been the ``best`` or not."""
        wanted = self.state.ended_early or (best and self.settings.keep_best)
        return wanted or self._is_due(step, self.settings.save_every)

    def is_finished(self) -> bool:
        """Whether the checkpoint that it resumes from is that of a run's end."""
        return self.start >= self.plan.steps or self.state.ended_early

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self.plan.steps or (every is not None and step % every == 0)
