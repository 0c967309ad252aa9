"""The trainer: ``transformers.Trainer`` that follows a batch plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.collate import collate
from hfpatch.data.plan import BatchPlan
from hfpatch.errors import HfpatchError
from hfpatch.nn.matmul import MatmulLibrary, choose_library, fast_matmul, pinned_library
from hfpatch.training.callbacks import RunCallback, StepOutcome, SurvivalCallback, Tools
from hfpatch.training.diagnostics import QueryDiagnostic, diagnose
from hfpatch.training.interruption import SigtermWatch
from hfpatch.training.memory import peak_memory_bytes
from hfpatch.training.optim import build_optimizer, build_scheduler
from hfpatch.training.precision import autocast_context
from hfpatch.training.processes import runs_on_cpu
from hfpatch.training.records import StepRecord
from hfpatch.training.run import Run
from hfpatch.training.sharding import shard_on_cpus
from hfpatch.training.survival import UpdateSurvival
from hfpatch.training.throughput import tokens_per_s_at_most
from hfpatch.training.validation import mean_loss

COMPILE_BACKEND = "inductor"


class PlannedBlocks(Dataset[dict[str, torch.Tensor]]):
    """The plan's blocks in the plan's order, from step ``start`` on.

    Read in sequence and dealt out in turn, as accelerate does, each step's batch goes to the processes and
    micro-batches of that step, however many there are.
    """

    def __init__(self, blocks: TokenBlocks, plan: BatchPlan, start: int) -> None:
        self._blocks = blocks
        self._order = plan.indices[start:].reshape(-1)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        return self._blocks[int(self._order[position])]


class PlanTrainer(Trainer):
    """Trains on a run's plan with hfpatch's optimiser, schedule and loss.

    Args:
        model: what to train, within :func:`hfpatch.training.head.loss_in_forward`.
        run: the run.
        watch: tells whether this process was asked to end.
    """

    def __init__(self, model: PreTrainedModel, run: Run, watch: SigtermWatch) -> None:
        self._run = run
        self._watch = watch
        self._step_loss: torch.Tensor | None = None
        with _clear_about_trackers(run.settings.report_to):
            super().__init__(
                model=model,
                args=_arguments(run),
                train_dataset=PlannedBlocks(run.blocks, run.plan, run.start),
                data_collator=collate,
                compute_loss_func=_counted_elsewhere,
            )
        self.remove_callback(PrinterCallback)
        self._speed_limit = tokens_per_s_at_most(model, self.accelerator.state, run.settings.autocast)
        tools = Tools(self._take_outcome, self._evaluate, self._diagnose, self._log_record)
        self.add_callback(RunCallback(run, tools))  # before the next: an update left out is none to measure
        if run.measure_survival:
            self.add_callback(SurvivalCallback(UpdateSurvival(run.state.survival), run.settings, run.plan.steps))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; FSDP works on CPUs too."""
        super().create_accelerator_and_postprocess()
        shard_on_cpus(self.accelerator)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimiser from the run's settings."""
        self.optimizer = build_optimizer(self.model if model is None else model, self._run.settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Build the schedule over the whole plan, whatever part of it is left."""
        self.lr_scheduler = build_scheduler(optimizer or self.optimizer, self._run.settings, steps=self._run.plan.steps)
        return self.lr_scheduler

    def compute_loss_context_manager(self) -> Any:
        """Autocast the forward pass where the settings ask for it."""
        return autocast_context(self._run.settings.autocast, self.args.device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this micro-batch's share of the step's mean over tokens.

        The plan knows how many tokens the whole step predicts, so nothing is counted or exchanged here. Gradients
        are averaged over processes, hence the factor.
        """
        outputs = model(**inputs)
        predicted = self._run.blocks.count_predicted(self._run.plan.indices[self.state.global_step])
        loss = outputs.loss * (self.accelerator.num_processes / predicted)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Do one micro-batch and add its share to the step's loss."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing: the stock count walks all parameters at every micro-batch."""
        return 0

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> None:
        """Leave the counting of tokens to the plan."""

    def _take_outcome(self) -> StepOutcome:
        loss, self._step_loss = self._step_loss, None
        asked = float(self._watch.asked)
        told = torch.tensor([[math.nan if loss is None else float(loss), asked]], device=self.args.device)
        told = self.accelerator.gather(told)
        return StepOutcome(loss=float(told[:, 0].mean()), terminate=bool(told[:, 1].any()))

    def _evaluate(self) -> float:
        run, state = self._run, self.accelerator.state
        return mean_loss(
            self.model,
            run.held_out or run.blocks.head(1),
            batch_size=self.args.per_device_train_batch_size,
            autocast=run.settings.autocast,
            process=state.process_index,
            processes=state.num_processes,
            add_up=lambda value: self.accelerator.reduce(value, reduction="sum"),
        )

    def _diagnose(self, step: int) -> list[QueryDiagnostic]:
        run, size = self._run, self.args.per_device_train_batch_size
        assert run.held_out is not None
        return diagnose(self.model, run.held_out, step=step, batch_size=size, autocast=run.settings.autocast)

    def _log_record(self, record: StepRecord) -> None:
        """Send a step's figures to the trackers, if there are any."""
        if not self._run.settings.report_to:
            return
        speed = record.tokens / record.seconds
        figures = {
            "loss": record.loss,
            "learning_rate": record.lr,
            "tokens_per_s": speed,
            "mfu": speed / self._speed_limit,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        self.log(figures if record.eval_loss is None else {**figures, "eval_loss": record.eval_loss})


def _counted_elsewhere(*_: Any, **__: Any) -> torch.Tensor:
    """Tell the stock Trainer that the loss is a mean over the whole step; `PlanTrainer.compute_loss` sees to that."""
    raise AssertionError("PlanTrainer.compute_loss computes the loss")


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers that are unknown or not installed, by making each once, before anything runs.

    Raises:
        HfpatchError: naming them.
    """
    with _clear_about_trackers(names):
        for tracker in get_reporting_integration_callbacks(list(names)):
            tracker()


@contextlib.contextmanager
def _clear_about_trackers(names: tuple[str, ...]) -> Iterator[None]:
    """Say in one line which tracker is unknown or not installed."""
    try:
        yield
    except HfpatchError:
        raise
    except (ValueError, RuntimeError, ImportError) as error:
        if not names:
            raise
        reason = str(error).strip().partition("\n")[0]
        raise HfpatchError(f"training.report_to: {', '.join(names)} cannot be used ({reason})") from error


@contextlib.contextmanager
def prepared(model: PreTrainedModel, run: Run) -> Iterator[None]:
    """Switch checkpointing on where asked and let products take the faster library; put all of that back afterwards."""
    training, use_cache = model.training, getattr(model.config, "use_cache", None)
    if run.settings.gradient_checkpointing:
        switch_checkpointing(model, on=True)
    try:
        with pinned_library(run.state.matmul), fast_matmul(model, library=_agreed_library(model)) as run.state.matmul:
            yield
    finally:
        if run.settings.gradient_checkpointing:
            switch_checkpointing(model, on=False)
        model.config.use_cache = use_cache
        model.zero_grad(set_to_none=True)
        model.train(training)


def _agreed_library(model: PreTrainedModel) -> MatmulLibrary | None:
    """Return the library for matrix products that the first process chooses."""
    choice = [choose_library(model)]
    return cast("MatmulLibrary | None", broadcast_object_list(choice)[0])


def switch_checkpointing(model: PreTrainedModel, *, on: bool) -> None:
    """Recompute activations in the backward pass, or stop doing so.

    ``transformers`` names it activation checkpointing, or gradient checkpointing before version 5.10. With adapters it
    also makes the embeddings require a gradient, which only reentrant checkpointing needs; that is undone, so that
    frozen layers below the first patched one still build no graph.
    """
    current = hasattr(model, "activation_checkpointing_enable")
    kind = "activation" if current else "gradient"
    if on:
        enable = getattr(model, f"{kind}_checkpointing_enable")
        enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
        if hasattr(model, "_require_grads_hook") or hasattr(model, "_require_grads_hooks"):
            model.disable_input_require_grads()
    else:
        getattr(model, f"{kind}_checkpointing_disable")()


def _arguments(run: Run) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints),
        max_steps=run.plan.steps - run.start,
        per_device_train_batch_size=1,
        max_grad_norm=run.settings.max_grad_norm or 0.0,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        use_cpu=runs_on_cpu(),
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        torch_compile=run.settings.compile,
        torch_compile_backend=COMPILE_BACKEND if run.settings.compile else None,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to=list(run.settings.report_to) or "none",
        disable_tqdm=True,
        seed=run.seed,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    micro, accumulation = _divide(run, arguments.world_size)
    arguments.per_device_train_batch_size = micro
    arguments.gradient_accumulation_steps = accumulation
    return arguments


def _divide(run: Run, processes: int) -> tuple[int, int]:
    """Return the micro-batch of one process and how many of them make its part of the batch."""
    batch = run.plan.batch_size
    micro = run.settings.micro_batch_size or max(1, batch // processes)
    if batch % (micro * processes):
        raise HfpatchError(
            f"a batch of {batch} cannot be divided in micro-batches of {micro} on {processes} processes; "
            "change batch_size or micro_batch_size"
        )
    return micro, batch // (micro * processes)
