"""The training loop: a run from its folder to its result, step by step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
    broadcast_object_list,
    set_seed,
)
from transformers import PreTrainedModel

from hfpatch.data.blocks import collate
from hfpatch.errors import HfpatchError
from hfpatch.models.attention import fast_attention
from hfpatch.nn.matmul import choose_library, fast_matmul
from hfpatch.results.parts import TrainResult
from hfpatch.support.cpu import keep_freed_memory, pinned_library
from hfpatch.support.environment import is_set
from hfpatch.support.modes import set_checkpointing
from hfpatch.training.activations import CheapRecomputation, pays
from hfpatch.training.checkpoint import load_optimizer, load_trainables, read_checkpoint, save_checkpoint, step_name
from hfpatch.training.diagnostics import counting_survival, diagnose, survival_shares, survival_steps
from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory, tokens_per_s_at_most
from hfpatch.training.head import loss_in_forward
from hfpatch.training.interruption import SigtermWatch, Terminated, watch_sigterm
from hfpatch.training.optim import build_optimizer, build_scheduler, trainable_parameters
from hfpatch.training.processes import start_processes
from hfpatch.training.records import StepRecord, summarise
from hfpatch.training.run import Run, check_run, open_folder
from hfpatch.training.sharding import FSDP, configure_deepspeed, whole, whole_afterwards
from hfpatch.training.trackers import Trackers, check_trackers
from hfpatch.training.validation import autocast_context, mean_loss

COMPILE_BACKEND = "inductor"


def run_training(model: PreTrainedModel, run: Run) -> TrainResult:
    """Train to the end of the plan, from the newest checkpoint in the run's folder where there is one.

    Raises:
        HfpatchError: if the launcher asks for mixed precision, the folder holds another run, the batch cannot be
            divided, the model cannot keep packed documents apart, take blocks as long as these or recompute its
            activations as asked, a tracker is not installed, or the loss is not finite.
        Terminated: if the process was sent SIGTERM; a checkpoint has been written then.
    """
    start_processes()
    check_run(model, run)
    check_trackers(run.settings.report_to)
    open_folder(run)
    if run.checkpoint is not None:
        load_trainables(run.checkpoint, trainable_parameters(model))
    speed_limit = tokens_per_s_at_most(model, PartialState(), run.settings.autocast)
    reset_peak_memory()
    if run.start < run.plan.steps and not run.state.ended_early:
        with whole_afterwards(model) as trained, prepared(trained, run), watch_sigterm() as sigterm:
            loop = TrainingLoop(trained, run, speed_limit)
            loop.train(sigterm)
            loop.accelerator.free_memory()
    if run.settings.keep_best and run.state.best_step is not None:
        PartialState().wait_for_everyone()  # the first process may still be writing the checkpoint
        best = read_checkpoint(run.checkpoints / step_name(run.state.best_step))
        load_trainables(best, trainable_parameters(model))
    return summarise(
        run.records,
        peak_memory_bytes=peak_memory_bytes(),
        update_survival=survival_shares(run.state.survival),
        state=run.state,
        speed_limit=speed_limit,
    )


@contextlib.contextmanager
def prepared(model: PreTrainedModel, run: Run) -> Iterator[None]:
    """Let the forward pass return the loss, recompute activations where asked, and use the fastest kernels here.

    All of that is undone afterwards. The first process chooses the library of matrix products for all.
    """
    modes = {module: module.training for module in model.modules()}
    if run.settings.gradient_checkpointing:
        switch_checkpointing(model, on=True)
    try:
        with pinned_library(run.state.matmul), contextlib.ExitStack() as stack:
            library = broadcast_object_list([choose_library(model)])[0]
            run.state.matmul = stack.enter_context(fast_matmul(model, library=library))
            if library is not None:
                keep_freed_memory()
            stack.enter_context(loss_in_forward(model))
            stack.enter_context(fast_attention())
            yield
    finally:
        if run.settings.gradient_checkpointing:
            switch_checkpointing(model, on=False)
        model.zero_grad(set_to_none=True)
        for module, mode in modes.items():
            module.training = mode


def switch_checkpointing(model: PreTrainedModel, *, on: bool) -> None:
    """Recompute activations in the backward pass, or stop doing so.

    With adapters ``transformers`` also makes the embeddings require a gradient, which only reentrant checkpointing
    needs; that is undone, so that frozen layers below the first patched one still build no graph.
    """
    set_checkpointing(model, reentrant=False if on else None)
    if on and (hasattr(model, "_require_grads_hook") or hasattr(model, "_require_grads_hooks")):
        model.disable_input_require_grads()  # some models remove them unasked


class TrainingLoop:
    """The remaining steps of a run, on the launcher's processes.

    accelerate wraps the model (DDP, FSDP2, DeepSpeed, torch.compile) and communicates between processes; the order of
    operations is all here. The model is within :func:`prepared`, the run's folder opened; ``speed_limit`` is the
    machine's in tokens a second, of which trackers report a step's share.
    """

    def __init__(self, model: PreTrainedModel, run: Run, speed_limit: float) -> None:
        # As the launcher asks; the recipe alone decides precision and micro-batches.
        AcceleratorState._reset_state(reset_partial_state=True)  # an earlier run of this process may have been sharded
        start_processes()
        accelerator = Accelerator(
            dynamo_plugin=TorchDynamoPlugin(backend=COMPILE_BACKEND if run.settings.compile else None),
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # it would divide the loss once more
        )
        if is_set(FSDP) and accelerator.state.distributed_type == DistributedType.MULTI_CPU:
            # Shard on CPUs too, instead of accelerate's silent DDP
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
            accelerator.state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.run, self.accelerator = run, accelerator
        self.micro_batch = run.micro_batch(accelerator.num_processes)
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            configure_deepspeed(accelerator, run.plan.batch_size, self.micro_batch, run.settings.max_grad_norm)

        self.model, self.optimizer = accelerator.prepare(model, build_optimizer(model, run.settings))
        self.scheduler = build_scheduler(self.optimizer, run.settings, steps=run.plan.steps)
        self.parameters = trainable_parameters(model)  # by their own names, however the model is wrapped
        self.evaluated = self.model if accelerator.distributed_type == DistributedType.FSDP else model
        cheap = (
            accelerator.device.type == "cpu"
            and accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
            and not (run.settings.gradient_checkpointing or run.settings.compile)
            and pays(model, self.micro_batch * run.blocks.block_size)
        )
        self.activations = CheapRecomputation(model) if cheap else contextlib.nullcontext()
        if run.checkpoint is not None:
            load_optimizer(run.checkpoint, self.parameters, self.optimizer, self.scheduler)
        self.trackers = Trackers(run, model, speed_limit)

    def train(self, sigterm: SigtermWatch) -> None:
        """Do the steps from the checkpoint to the plan's end, or to where the run stops early or diverges.

        Randomness (dropout) of a step depends on seed, step and process alone, so a run resumes exactly without stored
        generators.

        Raises:
            HfpatchError: if a loss or gradient is not finite and ``on_bad_loss`` is stop, or a file cannot be written.
            Terminated: if a process was asked to end; a checkpoint has been written then.
        """
        run, settings, accelerator, state = self.run, self.run.settings, self.accelerator, self.run.state
        measured = frozenset[int]()
        if run.measure_survival:
            measured = survival_steps(steps=run.plan.steps, warmup_steps=settings.warmup_steps)
        self.model.train()
        if run.start == 0 and run.evaluates_after(0):
            self._keep(StepRecord(0, math.nan, lr=0.0, tokens=0, seconds=0.0, eval_loss=self._evaluate()))
        clock = time.perf_counter()

        for step in range(run.start + 1, run.plan.steps + 1):
            origin = np.random.SeedSequence([run.seed, step - 1, accelerator.process_index])
            set_seed(int(origin.generate_state(1)[0]))
            group = self.optimizer.param_groups[0]
            lr = float(settings.lr * group["lr"] / group["initial_lr"])  # of a tensor group without a rate of its own

            # Forward and backward; every process learns the loss of all, and whether any is asked to end.
            share = self._accumulate_gradients(step)
            norm = accelerator.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm or math.inf)
            shared = accelerator.gather(torch.stack([share, torch.full_like(share, sigterm.asked)])[None])
            loss, terminate = float(shared[:, 0].mean()), bool(shared[:, 1].any()) and step < run.plan.steps
            if not (math.isfinite(loss) and math.isfinite(float(whole(norm)))) or run.diverges(step, loss):
                self._leave_update_out(step, loss)

            # Update.
            counting = counting_survival(state.survival, self.parameters)
            with counting if step - 1 in measured else contextlib.nullcontext():
                self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

            # Record, and evaluate where the recipe asks for it.
            tokens, skipped = run.blocks.count_tokens(run.plan.indices[step - 1]), step in state.skipped[-1:]
            record = StepRecord(step, loss, lr, tokens, time.perf_counter() - clock, skipped=skipped or None)
            best, may_diverge = False, run.on_bad_loss == "record" and state.diverged_step is None
            if run.evaluates_after(step):
                record = replace(record, eval_loss=(eval_loss := self._evaluate()))
                best = state.evaluated(step, eval_loss, settings.patience)
                if run.diverges(step, eval_loss):
                    state.diverged_step = step
            elif step == run.plan.steps and may_diverge and run.diverges(step, self._evaluate()):
                state.diverged_step = step  # by the last update, which no step's loss has seen
            if run.on_bad_loss == "skip" and (step == run.plan.steps or state.stopped) and self._is_broken(record):
                state.diverged_step = step
            self._keep(record)
            self.trackers.log(record)

            # Save, report, and stop where that is due.
            wanted = terminate or state.ended_early or (best and settings.keep_best)
            if wanted or run.is_due(step, settings.save_every):
                self._save(step)
            if accelerator.is_main_process and run.on_step is not None:
                run.on_step(record)
            if terminate:
                raise Terminated(step)
            if state.ended_early:
                break
            clock = time.perf_counter()
        self.trackers.call("on_train_end")

    def _accumulate_gradients(self, step: int) -> torch.Tensor:
        """Run this process's micro-batches of a step forward and backward; return its part of the step's loss.

        The loss is the mean over all tokens that the step predicts. The plan knows their number, so processes need not
        exchange counts. Gradients are averaged over processes, hence the factor.
        """
        run, accelerator = self.run, self.accelerator
        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        backward = partial(accelerator.backward, scale_wrt_gas=False) if deepspeed else accelerator.backward
        indices = run.plan.indices[step - 1]
        factor = accelerator.num_processes / run.blocks.count_predicted(indices)
        rows_of = indices.reshape(-1, accelerator.num_processes, self.micro_batch)[:, accelerator.process_index]
        batches = [collate([run.blocks[row] for row in rows]) for rows in rows_of.tolist()]
        batches = [{name: value.to(accelerator.device) for name, value in batch.items()} for batch in batches]
        total = torch.zeros((), dtype=torch.float32, device=accelerator.device)
        for number, batch in enumerate(batches, start=1):
            accelerator.sync_gradients = last = number == len(batches)
            exchange = contextlib.nullcontext() if last or deepspeed else accelerator.no_sync(self.model)
            with exchange:
                with autocast_context(run.settings.autocast, accelerator.device), self.activations:
                    loss = self.model(**batch, use_cache=False).loss * factor
                backward(loss)
            total += loss.detach()
        return total

    def _leave_update_out(self, step: int, loss: float) -> None:
        """Drop the gradients of a step whose loss or gradient is not finite, or whose loss has diverged."""
        run = self.run
        if run.on_bad_loss == "stop":
            what = f"{loss:.4f} but its gradient is not finite" if math.isfinite(loss) else f"{loss}"
            raise HfpatchError(
                f"step {step}: the loss is {what}, on blocks {run.plan.indices[step - 1].tolist()}; "
                f"{self._last_checkpoint()}; lower the learning rate, clip the gradient, look at these blocks, or set "
                "training.on_bad_loss=skip to leave such updates out"
            )
        if run.on_bad_loss == "record":
            run.state.diverged_step = step
        else:
            run.state.skipped.append(step)
        self.optimizer.zero_grad()

    def _is_broken(self, last: StepRecord) -> bool:
        """Whether the model at the end of a run has no finite loss, so that leaving updates out has not saved it."""
        if self.run.settings.keep_best and self.run.state.best_step is not None:
            return False  # an earlier one is kept
        return not math.isfinite(self._evaluate() if last.eval_loss is None else last.eval_loss)

    def _evaluate(self) -> float:
        """Return the loss on the held-out blocks; without any, on the first block trained on."""
        return mean_loss(
            self.evaluated,
            self.run.held_out or self.run.blocks.head(1),
            batch_size=self.micro_batch,
            autocast=self.run.settings.autocast,
            process=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
            add_up=self.accelerator.reduce,
        )

    def _keep(self, record: StepRecord) -> None:
        """Record a step, and the diagnostics due after it: at the start, at the end and every so many steps."""
        run, main = self.run, self.accelerator.is_main_process
        run.records.append(record)
        if main:
            run.metrics.append(record)
        if run.held_out is None or run.diagnose_every is None:
            return
        if run.state.ended_early or run.is_due(record.step, run.diagnose_every):
            size, autocast = self.micro_batch, run.settings.autocast
            series = diagnose(self.evaluated, run.held_out, step=record.step, batch_size=size, autocast=autocast)
            if main:
                run.diagnostics.write([dict(diagnostic) for diagnostic in series])

    def _save(self, step: int) -> None:
        run, main = self.run, self.accelerator.is_main_process
        if main:
            run.metrics.sync()
            run.diagnostics.sync()
        try:
            save_checkpoint(
                run.checkpoints,
                step=step,
                parameters=self.parameters,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                identity=run.identity,
                state=run.state,
                keep=run.settings.keep_checkpoints,
                write=main,
            )
        except HfpatchError as error:
            raise HfpatchError(f"{error}; {self._last_checkpoint()}") from error

    def _last_checkpoint(self) -> str:
        saved = sorted(self.run.checkpoints.glob("step-*"))
        return f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
