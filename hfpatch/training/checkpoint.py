"""Checkpoints: what is trained, the optimiser and the schedule, never the base; safetensors and JSON only.

A checkpoint is written beside its place and renamed, so a folder ``step-<number>`` is always whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LRScheduler

from hfpatch.errors import HfpatchError
from hfpatch.files import atomic_directory, read_json, write_json

_TRAINABLE = "trainable.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "state.json"
_SEPARATOR = "/"
Parameters = Mapping[str, torch.nn.Parameter]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk.

    Attributes:
        folder: where it lies.
        step: optimiser steps done.
        survival: the counts of :class:`hfpatch.training.survival.UpdateSurvival` so far.
    """

    folder: Path
    step: int
    survival: dict[str, tuple[int, int]]


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    identity: Mapping[str, Any],
    survival: Mapping[str, tuple[int, int]],
    keep: int,
) -> None:
    """Write ``folder/step-<step>`` and remove all but the ``keep`` newest.

    Args:
        folder: the run's checkpoint folder.
        step: optimiser steps done.
        parameters: what is trained, by name.
        optimizer: its state is stored by parameter name.
        scheduler: its state is stored as JSON.
        identity: what a resumed run must share: plan, data, settings.
        survival: counts so far.
        keep: how many checkpoints to keep.
    """
    moments = {
        f"{name}{_SEPARATOR}{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }
    state = {
        "step": step,
        "identity": dict(identity),
        "survival": dict(survival),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "scheduler": scheduler.state_dict(),
    }
    with atomic_directory(folder / f"step-{step:08d}") as temporary:
        save_file({name: value.detach().contiguous() for name, value in parameters.items()}, temporary / _TRAINABLE)
        save_file(moments, temporary / _OPTIMIZER)
        write_json(temporary / _STATE, state)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def newest_checkpoint(folder: Path, identity: Mapping[str, Any]) -> Checkpoint | None:
    """Return the newest checkpoint, or None if there is none.

    Raises:
        HfpatchError: if it is of a run with another plan, other data or other settings.
    """
    found = sorted(folder.glob("step-*"))
    if not found:
        return None
    state = read_json(found[-1] / _STATE)
    for name, value in identity.items():
        if (stored := state["identity"].get(name)) != value:
            raise HfpatchError(
                f"{found[-1]}: the checkpoint is of a run with another {name} ({stored}, now {value}); "
                "resume with the same recipe or start a new run"
            )
    survival = {group: (changed, moved) for group, (changed, moved) in state["survival"].items()}
    return Checkpoint(found[-1], state["step"], survival)


def load_trainables(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Copy the checkpoint's tensors into the model's.

    Raises:
        HfpatchError: if a tensor is missing, unexpected or of another shape or dtype, or the file is damaged.
    """
    path = checkpoint.folder / _TRAINABLE
    tensors = _load(path)
    if different := sorted(tensors.keys() ^ parameters.keys()):
        raise HfpatchError(f"{path}: is of another patch; {different[0]} is only on one side; start a new run")
    for name, parameter in parameters.items():
        stored = tensors[name]
        if (stored.shape, stored.dtype) != (parameter.shape, parameter.dtype):
            raise HfpatchError(
                f"{path}: {name} is {tuple(stored.shape)} {stored.dtype}, the model's is "
                f"{tuple(parameter.shape)} {parameter.dtype}; start a new run"
            )
        parameter.data.copy_(stored)


def load_optimizer(
    checkpoint: Checkpoint, parameters: Parameters, optimizer: torch.optim.Optimizer, scheduler: LRScheduler
) -> None:
    """Restore the optimiser's moments and groups and the schedule's place.

    Raises:
        HfpatchError: if a file is damaged.
    """
    for key, value in _load(checkpoint.folder / _OPTIMIZER).items():
        name, _, entry = key.rpartition(_SEPARATOR)
        optimizer.state[parameters[name]][entry] = value.to(parameters[name].device)
    state = read_json(checkpoint.folder / _STATE)
    for group, stored in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(stored)
    scheduler.load_state_dict(state["scheduler"])


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise HfpatchError(f"{path}: the checkpoint is damaged ({error}); delete its folder and resume") from error
