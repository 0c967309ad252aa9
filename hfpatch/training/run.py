"""One run: its fixed parts and what it has done so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.plan import BatchPlan
from hfpatch.training.checkpoint import Checkpoint
from hfpatch.training.records import MetricsFile, StepRecord
from hfpatch.training.settings import NOT_IDENTITY, LoopSettings
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
        held_out: the blocks whose loss is measured, or None.
        on_step: called with each step's record, on the main process.
        measure_survival: whether to measure update survival.
        checkpoint: where it resumes from, or None.
        records: the records so far.
        state: what else it knows so far.
    """

    settings: LoopSettings
    blocks: TokenBlocks
    plan: BatchPlan
    seed: int
    folder: Path
    held_out: TokenBlocks | None = None
    on_step: Callable[[StepRecord], None] | None = None
    measure_survival: bool = True
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
        }

    def evaluates_after(self, step: int) -> bool:
        """Whether the evaluation loss is due after ``step`` steps."""
        return self.held_out is not None and self._is_due(step, self.settings.evaluate_every)

    def saves_after(self, step: int, *, best: bool) -> bool:
        """Whether a checkpoint is due after ``step`` steps, the last evaluation having been the ``best`` or not."""
        wanted = self.state.stopped or (best and self.settings.keep_best)
        return wanted or self._is_due(step, self.settings.save_every)

    def is_finished(self) -> bool:
        """Whether the checkpoint that it resumes from is that of a run's end."""
        return self.start >= self.plan.steps or self.state.stopped

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self.plan.steps or (every is not None and step % every == 0)
