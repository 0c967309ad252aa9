"""Training of a patch: a frozen base, a few trained tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.plan import BatchPlan
from hfpatch.recipes.training import TrainingSettings
from hfpatch.results.parts import TrainResult
from hfpatch.surgery.bases import hash_tensors
from hfpatch.training.loop import run_training
from hfpatch.training.optim import cast_trainables, trainable_parameters
from hfpatch.training.records import StepRecord
from hfpatch.training.run import Run


def train_probe(
    model: PreTrainedModel,
    *,
    settings: TrainingSettings,
    blocks: TokenBlocks,
    plan: BatchPlan,
    seed: int,
    run_dir: Path,
    held_out: TokenBlocks | None = None,
    resume: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
    origin: Mapping[str, str | None] | None = None,
    blocks_checked: bool = False,
) -> TrainResult:
    """Train the parameters of ``model`` that are not frozen, in place.

    Writes ``run_dir/metrics.jsonl`` and ``run_dir/checkpoints/``. The plan decides the number of steps and each
    step's batch. With ``settings.on_bad_loss`` at ``record`` a run whose loss or gradient is not finite ends there;
    ``diverged_step`` of the result names the step, and resuming returns the same result at once.

    Args:
        model: a patched model (or any with some parameters frozen).
        settings: the recipe's training section; ``trainable_dtype`` is applied here.
        blocks: the training blocks.
        plan: which blocks each step sees, drawn for these blocks.
        seed: the seed of dropout.
        run_dir: the run's own folder.
        held_out: blocks that are never trained on; the loss on all of them is recorded as ``eval_loss``,
            before the first step too where the recipe has ``evaluate_every``.
        resume: continue from the newest checkpoint in ``run_dir``; without one, start again.
        on_step: called after each step, on the main process.
        origin: hashes of the base and of the method's settings, kept in every checkpoint; a run only resumes with the
            same ones. None takes the hash of the frozen parameters.
        blocks_checked: whether the model is known to take the blocks; otherwise packed ones are tried on it.

    Raises:
        HfpatchError: if nothing is trainable, or as :func:`hfpatch.training.loop.run_training`.
        Terminated: if the process was sent SIGTERM; a checkpoint has been written then.
    """
    groups = {group: getattr(torch, dtype) for group, dtype in settings.trainable_dtypes.items()}
    cast_trainables(model, getattr(torch, settings.trainable_dtype), groups)
    dtypes = {str(value.dtype).removeprefix("torch.") for value in trainable_parameters(model).values()}
    low = sorted(dtypes - {"float32", "float64"})
    if low and PartialState().is_main_process:  # no loss curve shows it
        warnings.warn(
            f"trained weights are kept in {', '.join(low)}, which loses small updates; update_survival says how many",
            stacklevel=2,
        )
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    run = Run(
        settings=settings,
        blocks=blocks,
        plan=plan,
        seed=seed,
        folder=run_dir,
        origin=origin or {"frozen": hash_tensors(frozen)},
        held_out=held_out,
        evaluate_at_start=held_out is not None and settings.evaluate_every is not None,
        on_step=on_step,
        on_bad_loss=settings.on_bad_loss,
        blocks_checked=blocks_checked,
    )
    return run_training(model, run, resume=resume)
