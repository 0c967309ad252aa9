"""The trainer: ``transformers.Trainer`` that follows a batch plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.collate import collate
from hfpatch.data.exactness import packing_is_exact
from hfpatch.data.plan import BatchPlan
from hfpatch.errors import HfpatchError
from hfpatch.training.callbacks import Run, RunCallback, SurvivalCallback
from hfpatch.training.checkpoint import load_trainables, newest_checkpoint, remove_leftovers
from hfpatch.training.loss import token_loss
from hfpatch.training.memory import peak_memory_bytes, reset_peak_memory
from hfpatch.training.optim import build_optimizer, build_scheduler
from hfpatch.training.precision import autocast_context, trainable_parameters
from hfpatch.training.records import TrainResult, summarise
from hfpatch.training.settings import LoopSettings
from hfpatch.training.survival import UpdateSurvival


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
        model: what to train.
        run: the run.
        min_lr_ratio: floor of the cosine schedule, as a share of the peak.
    """

    def __init__(self, model: PreTrainedModel, run: Run, min_lr_ratio: float) -> None:
        self._run = run
        self._min_lr_ratio = min_lr_ratio
        self._step_loss: torch.Tensor | None = None
        super().__init__(
            model=model,
            args=_arguments(run),
            train_dataset=PlannedBlocks(run.blocks, run.plan, run.start),
            data_collator=collate,
            compute_loss_func=token_loss,
        )
        self.remove_callback(PrinterCallback)
        if run.survival is not None:
            self.add_callback(SurvivalCallback(run.survival, run.settings, run.plan.steps))
        self.add_callback(RunCallback(run, self._take_loss))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimiser from the run's settings."""
        self.optimizer = build_optimizer(self.model if model is None else model, self._run.settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Build the schedule over the whole plan, whatever part of it is left."""
        self.lr_scheduler = build_scheduler(
            optimizer or self.optimizer,
            self._run.settings,
            steps=self._run.plan.steps,
            min_lr_ratio=self._min_lr_ratio,
        )
        return self.lr_scheduler

    def compute_loss_context_manager(self) -> Any:
        """Autocast the forward pass where the settings ask for it."""
        return autocast_context(self._run.settings.autocast, self.args.device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Do one micro-batch and add its share to the step's loss."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing: the stock count walks all parameters at every micro-batch."""
        return 0

    def _take_loss(self) -> float:
        loss, self._step_loss = self._step_loss, None
        return float(self.accelerator.gather(loss).mean())


def run_training(
    model: PreTrainedModel, run: Run, *, resume: bool, min_lr_ratio: float = 0.0, measure_survival: bool
) -> TrainResult:
    """Train to the end of the plan, from the newest checkpoint where there is one and ``resume`` is set.

    Raises:
        HfpatchError: if the folder holds another run, the batch cannot be divided, the model cannot keep packed
            documents apart, or the loss is not finite.
    """
    _check_plan(run)
    _check_packing(model, run.blocks)
    _open_folder(run, resume=resume)
    if run.checkpoint is not None:
        load_trainables(run.checkpoint, trainable_parameters(model))
    if measure_survival:
        run.survival = UpdateSurvival(run.checkpoint.survival if run.checkpoint else None)
    reset_peak_memory()
    if run.start < run.plan.steps:
        with _prepared(model, run.settings):
            trainer = PlanTrainer(model, run, min_lr_ratio)
            trainer.train()
            trainer.accelerator.free_memory()
    shares = run.survival.shares() if run.survival else {}
    return summarise(run.records, peak_memory_bytes=peak_memory_bytes(), update_survival=shares)


def _check_plan(run: Run) -> None:
    run.plan.check(len(run.blocks))
    planned, asked = (run.plan.steps, run.plan.batch_size), (run.settings.steps, run.settings.batch_size)
    if planned != asked:
        raise HfpatchError(
            f"the batch plan has {planned[0]} steps of {planned[1]} blocks, the settings ask for {asked[0]} of "
            f"{asked[1]}; start a new run or set steps and batch_size as planned"
        )


def _open_folder(run: Run, *, resume: bool) -> None:
    if not resume and run.metrics.path.exists():
        raise HfpatchError(f"{run.folder}: holds a run already; resume it or choose another folder")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run.checkpoints)
    run.checkpoint = newest_checkpoint(run.checkpoints, run.identity)
    if run.metrics.path.exists():
        run.metrics.truncate(run.start)
    run.records = run.metrics.read()


def _check_packing(model: PreTrainedModel, blocks: TokenBlocks) -> None:
    several = len(blocks.sizes) > len(blocks)
    if blocks.packing and several and not packing_is_exact(model):
        raise HfpatchError(
            f"{model.config.model_type} models cannot keep packed documents apart: attention crosses from one to the "
            "next; set data.packing=false"
        )


@contextlib.contextmanager
def _prepared(model: PreTrainedModel, settings: LoopSettings) -> Iterator[None]:
    """Switch checkpointing on where asked, and put back what training changes about the model besides its weights."""
    training, use_cache = model.training, getattr(model.config, "use_cache", None)
    if settings.gradient_checkpointing:
        _switch_checkpointing(model, on=True)
        model.enable_input_require_grads()
    try:
        yield
    finally:
        if settings.gradient_checkpointing:
            _switch_checkpointing(model, on=False)
            model.disable_input_require_grads()
        model.config.use_cache = use_cache
        model.zero_grad(set_to_none=True)
        model.train(training)


def _switch_checkpointing(model: PreTrainedModel, *, on: bool) -> None:
    """Call what ``transformers`` names activation checkpointing, or gradient checkpointing before version 5.10."""
    current = hasattr(model, "activation_checkpointing_enable")
    kind = "activation" if current else "gradient"
    if on:
        enable = getattr(model, f"{kind}_checkpointing_enable")
        enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
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
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
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
