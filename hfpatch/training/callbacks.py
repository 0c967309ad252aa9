"""What happens around each step: seeding, the stop at NaN, records, evaluation, checkpoints and SIGTERM."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from hfpatch.errors import HfpatchError
from hfpatch.recipes.training import LoopSettings
from hfpatch.training.checkpoint import load_optimizer, save_checkpoint
from hfpatch.training.diagnostics import QueryDiagnostic
from hfpatch.training.interruption import Terminated
from hfpatch.training.optim import current_lr
from hfpatch.training.precision import trainable_parameters
from hfpatch.training.records import StepRecord
from hfpatch.training.run import Run
from hfpatch.training.sharding import whole
from hfpatch.training.survival import UpdateSurvival, survival_steps


@dataclass(frozen=True)
class StepOutcome:
    """What the processes found out together in a step.

    Attributes:
        loss: nats per predicted token of the whole step.
        terminate: whether a process was asked to end.
    """

    loss: float
    terminate: bool


@dataclass(frozen=True)
class Tools:
    """What a trainer lends its callback.

    Attributes:
        take_outcome: returns the step's outcome, the same on every process, and forgets it.
        evaluate: returns the loss on the run's held-out blocks; without any, on the first block trained on.
        diagnose: measures the query paths after so many steps.
        log: sends figures to the trackers.
    """

    take_outcome: Callable[[], StepOutcome]
    evaluate: Callable[[], float]
    diagnose: Callable[[int], list[QueryDiagnostic]]
    log: Callable[[StepRecord], None]


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
        tools: what the trainer lends.
    """

    def __init__(self, run: Run, tools: Tools) -> None:
        self._run = run
        self._tools = tools
        self._clock = 0.0
        self._lr = 0.0
        self._outcome = StepOutcome(math.nan, terminate=False)

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
        if run.start == 0:
            self._look_before_training(write=state.is_world_process_zero)
        self._clock = time.perf_counter()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        """Seed the step."""
        origin = np.random.SeedSequence([self._run.seed, state.global_step, args.process_index])
        set_seed(int(origin.generate_state(1)[0]))
        self._lr = current_lr(optimizer, self._run.settings)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        """Look at the loss and the gradient before they change anything."""
        self._outcome = self._tools.take_outcome()
        run, loss, step = self._run, self._outcome.loss, state.global_step + 1
        trained = trainable_parameters(model)
        finite = math.isfinite(loss) and _is_finite(
            [value.grad for value in trained.values() if value.grad is not None]
        )
        if finite and not run.diverges(step, loss):
            return
        if run.on_bad_loss == "stop":
            raise HfpatchError(self._bad_step(step, loss))
        if run.on_bad_loss == "record":
            run.state.diverged_step = step
        else:
            run.state.skipped.append(step)
        optimizer.zero_grad(set_to_none=True)

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
        """Record the step, then evaluate and save where due, and leave where that was asked for."""
        run, step = self._run, state.global_step
        record, best = self._record(step), False
        if run.evaluates_after(step):
            record = replace(record, eval_loss=self._tools.evaluate())
            best = self._judge(step, record.eval_loss or 0.0)
        elif step == run.plan.steps and run.diverges(step, self._tools.evaluate()):  # the last update, seen by no loss
            run.state.diverged_step = run.state.diverged_step or step
        self._keep(record, write=state.is_world_process_zero)
        self._tools.log(record)
        terminate = self._outcome.terminate and step < run.plan.steps
        if terminate or run.saves_after(step, best=best):
            self._save(step, model, optimizer, lr_scheduler, write=state.is_world_process_zero)
        if state.is_world_process_zero and run.on_step is not None:
            run.on_step(record)
        if terminate:
            raise Terminated(step)
        control.should_training_stop = control.should_training_stop or run.state.ended_early
        self._clock = time.perf_counter()

    def _look_before_training(self, *, write: bool) -> None:
        """Measure the untrained model, where that is asked for: curves begin at step 0."""
        run = self._run
        if run.evaluates_after(0):
            record = StepRecord(step=0, loss=math.nan, lr=0.0, tokens=0, seconds=0.0, eval_loss=self._tools.evaluate())
            self._keep(record, write=write)

    def _judge(self, step: int, eval_loss: float) -> bool:
        """Take note of an evaluation; return whether it is the best so far."""
        run = self._run
        if run.diverges(step, eval_loss):
            run.state.diverged_step = step
        return run.state.evaluated(step, eval_loss, run.settings.patience)

    def _keep(self, record: StepRecord, *, write: bool) -> None:
        """Write down a step, and the diagnostics due after it."""
        run = self._run
        run.records.append(record)
        if write:
            run.metrics.append(record)
        if run.diagnoses_after(record.step):
            found = self._tools.diagnose(record.step)
            if write:
                run.diagnostics.append(found)

    def _record(self, step: int) -> StepRecord:
        seconds = time.perf_counter() - self._clock
        tokens = self._run.blocks.count_tokens(self._run.plan.indices[step - 1])
        skipped = True if step in self._run.state.skipped[-1:] else None
        return StepRecord(step, self._outcome.loss, self._lr, tokens, seconds, skipped=skipped)

    def _bad_step(self, step: int, loss: float) -> str:
        what = f"the loss is {loss}"
        if math.isfinite(loss):
            what = f"the loss is {loss:.4f} but its gradient is not finite"
        indices = self._run.plan.indices[step - 1].tolist()
        return (
            f"step {step}: {what}, on blocks {indices}; {self._last_checkpoint()}; lower the learning rate, clip the "
            "gradient, look at these blocks, or set training.on_bad_loss=skip to leave such updates out"
        )

    def _save(self, step: int, model: Any, optimizer: Any, lr_scheduler: Any, *, write: bool) -> None:
        run = self._run
        if write:
            run.metrics.sync()
            run.diagnostics.sync()
        try:
            save_checkpoint(
                run.checkpoints,
                step=step,
                parameters=trainable_parameters(model),
                optimizer=optimizer,
                scheduler=lr_scheduler,
                identity=run.identity,
                state=run.state,
                keep=run.settings.keep_checkpoints,
                write=write,
            )
        except HfpatchError as error:
            raise HfpatchError(f"{error}; {self._last_checkpoint()}") from error

    def _last_checkpoint(self) -> str:
        saved = sorted(self._run.checkpoints.glob("step-*"))
        return f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"


def _is_finite(gradients: list[torch.Tensor]) -> bool:
    """Whether all gradients are; with the same answer on every process."""
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    return math.isfinite(float(whole(norm)))
