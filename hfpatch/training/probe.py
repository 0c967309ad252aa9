"""Training of a patch: a frozen base, a few trained tensors."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.recipes.training import TrainingSettings
from hfpatch.results.parts import TrainResult
from hfpatch.surgery.bases import hash_tensors
from hfpatch.training.loop import run_training
from hfpatch.training.optim import cast_trainables, trainable_parameters
from hfpatch.training.run import Run


def train_probe(model: PreTrainedModel, run: Run) -> TrainResult:
    """Train the parameters of ``model`` that are not frozen, in place, from the newest checkpoint in the run's folder.

    With ``on_bad_loss`` at ``record`` a run whose loss or gradient is not finite ends there; ``diverged_step`` of the
    result names the step, and resuming returns the same result at once.

    Args:
        model: a patched model (or any with some parameters frozen); ``trainable_dtype`` is applied here.
        run: the training, whose settings are `TrainingSettings`; without an ``origin`` it gets the hash of the frozen
            parameters.

    Raises:
        HfpatchError: if nothing is trainable, or as :func:`hfpatch.training.loop.run_training`.
        Terminated: if the process was sent SIGTERM; a checkpoint has been written then.
    """
    settings = run.settings
    assert isinstance(settings, TrainingSettings)
    groups = {group: getattr(torch, dtype) for group, dtype in settings.trainable_dtypes.items()}
    cast_trainables(model, getattr(torch, settings.trainable_dtype), groups)
    dtypes = {str(value.dtype).removeprefix("torch.") for value in trainable_parameters(model).values()}
    low = sorted(dtypes - {"float32", "float64"})
    if low and PartialState().is_main_process:  # no loss curve shows it
        warnings.warn(
            f"trained weights are kept in {', '.join(low)}, which loses small updates; update_survival says how many",
            stacklevel=2,
        )
    if not run.origin:
        frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
        run = replace(run, origin={"frozen": hash_tensors(frozen)})
    return run_training(model, run)
