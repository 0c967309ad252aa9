"""What happens around each step: seeding, records, evaluation, checkpoints, and the stop at a loss of NaN."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.plan import BatchPlan
from hfpatch.errors import HfpatchError
from hfpatch.training.checkpoint import Checkpoint, load_optimizer, save_checkpoint
from hfpatch.training.precision import trainable_parameters
from hfpatch.training.records import MetricsFile, StepRecord
from hfpatch.training.settings import LoopSettings
from hfpatch.training.survival import UpdateSurvival, survival_steps


@dataclass
class Run:
    """One run's fixed parts and what it has done so far.

    Attributes:
        settings: the recipe's section.
        blocks: the training blocks.
        plan: which blocks each step sees.
        seed: the run's seed.
        folder: the run folder; holds metrics.jsonl and checkpoints/.
        checkpoint: where it resumes from, or None.
        on_step: called with each step's record.
        evaluate: returns the loss on the evaluation blocks, or None without any.
        evaluate_every: steps between evaluations; None evaluates at the end only.
        records: the records so far.
        survival: measures update survival, or None.
    """

    settings: LoopSettings
    blocks: TokenBlocks
    plan: BatchPlan
    seed: int
    folder: Path
    checkpoint: Checkpoint | None = None
    on_step: Callable[[StepRecord], None] | None = None
    evaluate: Callable[[], float] | None = None
    evaluate_every: int | None = None
    records: list[StepRecord] = field(default_factory=list)
    survival: UpdateSurvival | None = None

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
        """What a resumed run must share with the checkpoint. Memory, saving and evaluation may differ."""
        free = {"seeds", "micro_batch_size", "gradient_checkpointing", "save_every", "keep_checkpoints"}
        settings = self.settings.model_dump(mode="json", exclude=free | {"evaluate_every"})
        return {"seed": self.seed, "batch plan": self.plan.sha256, "data": self.blocks.sha256, "settings": settings}

    def is_due(self, step: int, every: int | None) -> bool:
        """Whether something done every so many steps, and at the end, is due after ``step`` steps."""
        return step == self.plan.steps or (every is not None and step % every == 0)


class SurvivalCallback(TrainerCallback):
    """Measures update survival on the run's chosen steps."""

    def __init__(self, survival: UpdateSurvival, settings: LoopSettings, steps: int) -> None:
        self._survival = survival
        self._steps = survival_steps(steps=steps, warmup_steps=settings.warmup_steps)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, **kwargs: Any
    ) -> None:
        """Remember the weights."""
        if state.global_step in self._steps:
            self._survival.before(trainable_parameters(model))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, **kwargs: Any
    ) -> None:
        """Count what changed."""
        if state.global_step in self._steps:
            self._survival.after(trainable_parameters(model))


class RunCallback(TrainerCallback):
    """Keeps the run's books.

    Randomness (dropout) of a step depends on seed, step and process alone, so that no generator's state has to be
    stored to resume exactly.

    Args:
        run: the run.
        take_loss: returns the loss of the step just done, averaged over processes, and forgets it.
    """

    def __init__(self, run: Run, take_loss: Callable[[], float]) -> None:
        self._run = run
        self._take_loss = take_loss
        self._clock = 0.0
        self._lr = 0.0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        **kwargs: Any,
    ) -> None:
        """Take up where the checkpoint left off."""
        run = self._run
        state.global_step, state.max_steps = run.start, run.plan.steps
        if run.checkpoint is not None:
            load_optimizer(run.checkpoint, trainable_parameters(model), optimizer, lr_scheduler)
        self._clock = time.perf_counter()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        """Seed the step."""
        origin = np.random.SeedSequence([self._run.seed, state.global_step, args.process_index])
        set_seed(int(origin.generate_state(1)[0]))
        self._lr = float(optimizer.param_groups[0]["lr"])

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        **kwargs: Any,
    ) -> None:
        """Record the step, then evaluate and save where due."""
        run, step = self._run, state.global_step
        record = self._record(step)
        if run.evaluate is not None and run.is_due(step, run.evaluate_every):
            record = replace(record, eval_loss=run.evaluate())
        run.records.append(record)
        if state.is_world_process_zero:
            run.metrics.append(record)
            if run.is_due(step, run.settings.save_every):
                self._save(step, trainable_parameters(model), optimizer, lr_scheduler)
            if run.on_step is not None:
                run.on_step(record)
        self._clock = time.perf_counter()

    def _record(self, step: int) -> StepRecord:
        indices = self._run.plan.indices[step - 1]
        loss = self._take_loss()
        if not math.isfinite(loss):
            saved = sorted(self._run.checkpoints.glob("step-*"))
            last = f"the last checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
            raise HfpatchError(
                f"step {step}: the loss is {loss}, on blocks {indices.tolist()}; {last}; "
                "lower the learning rate, clip the gradient or look at these blocks"
            )
        seconds = time.perf_counter() - self._clock
        return StepRecord(step, loss, self._lr, self._run.blocks.count_tokens(indices), seconds)

    def _save(self, step: int, parameters: Mapping[str, torch.nn.Parameter], optimizer: Any, lr_scheduler: Any) -> None:
        save_checkpoint(
            self._run.checkpoints,
            step=step,
            parameters=parameters,
            optimizer=optimizer,
            scheduler=lr_scheduler,
            identity=self._run.identity,
            survival=self._run.survival.counts if self._run.survival else {},
            keep=self._run.settings.keep_checkpoints,
        )
