"""The pretrainer: every parameter trained, from the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.plan import BatchPlan
from hfpatch.files import atomic_directory
from hfpatch.training.loop import run_training
from hfpatch.training.precision import cast_trainables
from hfpatch.training.records import StepRecord, TrainResult
from hfpatch.training.run import Run
from hfpatch.training.settings import PretrainSettings


def pretrain(
    model: PreTrainedModel,
    *,
    settings: PretrainSettings,
    blocks: TokenBlocks,
    plan: BatchPlan,
    evaluation_blocks: TokenBlocks | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int,
    run_dir: Path,
    resume: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
) -> TrainResult:
    """Train all of ``model`` in float32, in place, and save it as a Hugging Face folder.

    Writes ``run_dir/metrics.jsonl``, ``run_dir/checkpoints/`` and at the end ``run_dir/model/``.

    Args:
        model: a model from :func:`hfpatch.training.architecture.build_model`, or one to train further.
        settings: the recipe's pretraining section.
        blocks: the training blocks.
        plan: which blocks each step sees, drawn for these blocks.
        evaluation_blocks: the loss on all of them is recorded as ``eval_loss``.
        tokenizer: saved beside the model.
        seed: fixes the randomness of dropout.
        run_dir: the run's own folder.
        resume: go on from the newest checkpoint in ``run_dir``; with none there, start anew.
        on_step: called after each step, on the main process.

    Raises:
        HfpatchError: as :func:`hfpatch.training.probe.train_probe`.
    """
    model.requires_grad_(True)
    cast_trainables(model, torch.float32)
    run = Run(
        settings=settings,
        blocks=blocks,
        plan=plan,
        seed=seed,
        folder=run_dir,
        held_out=evaluation_blocks,
        on_step=on_step,
        measure_survival=False,
    )
    result = run_training(model, run, resume=resume)
    if PartialState().is_main_process:
        _save_model(model, tokenizer, run_dir / "model")
    return result


def _save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    with atomic_directory(folder) as temporary, _no_progress_bar():
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
