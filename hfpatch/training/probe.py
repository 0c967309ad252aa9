"""The probe trainer: a frozen base, a few trained tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.plan import BatchPlan
from hfpatch.training.callbacks import Run
from hfpatch.training.precision import cast_trainables
from hfpatch.training.records import StepRecord, TrainResult
from hfpatch.training.settings import TrainingSettings
from hfpatch.training.trainer import run_training


def train_probe(
    model: PreTrainedModel,
    *,
    settings: TrainingSettings,
    blocks: TokenBlocks,
    plan: BatchPlan,
    seed: int,
    run_dir: Path,
    resume: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
) -> TrainResult:
    """Train what is not frozen in ``model``, in place, and leave everything else of it as it was.

    Writes ``run_dir/metrics.jsonl`` and ``run_dir/checkpoints/``. The plan decides the number of steps and each
    step's batch.

    Args:
        model: a patched model (or any with some parameters frozen).
        settings: the recipe's training section; ``trainable_dtype`` is applied here.
        blocks: the training blocks.
        plan: which blocks each step sees, drawn for these blocks.
        seed: fixes the randomness of dropout.
        run_dir: the run's own folder.
        resume: go on from the newest checkpoint in ``run_dir``; with none there, start anew.
        on_step: called after each step, on the main process.

    Raises:
        HfpatchError: if nothing is trainable, plan and blocks do not fit, the folder holds a run and ``resume`` is
            not set, a checkpoint does not fit, documents cannot be kept apart, or the loss is not finite.
    """
    cast_trainables(model, getattr(torch, settings.trainable_dtype))
    run = Run(settings=settings, blocks=blocks, plan=plan, seed=seed, folder=run_dir, on_step=on_step)
    return run_training(model, run, resume=resume, measure_survival=True)
