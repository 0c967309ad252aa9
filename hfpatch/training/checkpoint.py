"""Checkpoints: trained tensors, the optimiser and the schedule, never the base; safetensors and JSON only.

A checkpoint is written beside its place, synced and renamed, so a folder ``step-<number>`` is always whole; its
manifest.json has the hash of every file, which shows if one was damaged later.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LRScheduler

from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import flatten
from hfpatch.support.files import atomic_directory, check_manifest, read_json, write_json, write_manifest
from hfpatch.training.records import LoopState
from hfpatch.training.sharding import like, under_deepspeed, whole_tensors

_TRAINABLE = "trainable.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "state.json"
_SEPARATOR = "/"
_STEP = "step"
Parameters = Mapping[str, torch.nn.Parameter]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk, after ``step`` optimiser steps of the run with this ``identity``.

    It is ``resumable`` where it holds the optimiser's state, which DeepSpeed does not hand out.
    """

    folder: Path
    step: int
    state: LoopState
    identity: dict[str, Any]
    resumable: bool


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    identity: Mapping[str, Any],
    state: LoopState,
    keep: int,
    write: bool = True,
) -> None:
    """Write ``folder/step-<step>`` and remove all but the ``keep`` newest and the best.

    Every process must call it, as sharded tensors are gathered first; one has ``write`` set. The optimiser's state is
    stored by parameter name, the schedule's as JSON. ``identity`` has all that a resumed run must share: plan, data,
    settings. ``state`` names the best checkpoint.
    """
    moments = whole_tensors(
        {
            f"{name}{_SEPARATOR}{key}": value
            for name, parameter in parameters.items()
            for key, value in ({} if under_deepspeed() else optimizer.state.get(parameter, {})).items()
        }
    )
    trained = whole_tensors(parameters)
    if not write:
        return
    content = {
        "step": step,
        "resumable": not under_deepspeed(),
        "identity": dict(identity),
        "state": asdict(state),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "scheduler": scheduler.state_dict(),
    }
    with atomic_directory(folder / step_name(step)) as temporary:
        save_file({name: value.detach().contiguous() for name, value in trained.items()}, temporary / _TRAINABLE)
        save_file({name: value.contiguous() for name, value in moments.items()}, temporary / _OPTIMIZER)
        write_json(temporary / _STATE, content)
        write_manifest(temporary)
    remove_old(folder, step, best_step=state.best_step, keep=keep)


def remove_old(folder: Path, step: int, *, best_step: int | None, keep: int) -> None:
    """Remove the checkpoints up to ``step`` but for the ``keep`` newest and the best."""
    for old in sorted(path for path in folder.glob("step-*") if path.name <= step_name(step))[:-keep]:
        if best_step is None or old.name != step_name(best_step):
            shutil.rmtree(old)


def newest_checkpoint(folder: Path, identity: Mapping[str, Any]) -> Checkpoint | None:
    """Return the newest whole checkpoint, or None if there is none at all.

    A damaged one is passed over with a warning.

    Raises:
        HfpatchError: if it is of a run with another plan, other data or other settings, or all are damaged.
    """
    damage: HfpatchError | None = None
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            checkpoint = read_checkpoint(path)
        except HfpatchError as error:
            damage = damage or error
            continue
        old, new = flatten(checkpoint.identity), flatten(identity)
        for name in (*new, *old):
            if old.get(name) != new.get(name):
                raise HfpatchError(
                    f"{path}: the checkpoint is of a run with another {name} ({old.get(name)}, now {new.get(name)}); "
                    "resume with the same recipe or start a new run"
                )
        if damage is not None:
            warnings.warn(f"{damage}; going on from {path.name}", stacklevel=2)
        return checkpoint
    if damage is not None:
        raise HfpatchError(f"{damage}; no whole checkpoint is left: delete the run and start it again")
    return None


def stored_origins(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Yield each readable checkpoint's state file and the ``origin`` in its identity, None where it names none."""
    for path in sorted(folder.glob(f"step-*/{_STATE}")):
        try:
            origin = read_json(path)["identity"].get("origin")
        except (HfpatchError, KeyError, TypeError, AttributeError):
            continue  # damaged, which matters where the run is resumed from it
        yield path, origin


def load_trainables(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Copy the checkpoint's tensors into the model's.

    Raises:
        HfpatchError: if a tensor is missing, unexpected or of another shape or dtype.
    """
    path = checkpoint.folder / _TRAINABLE
    tensors = load_file(path)  # whose hash was compared
    if different := sorted(tensors.keys() ^ parameters.keys()):
        raise HfpatchError(f"{path}: is of another patch; {different[0]} is only on one side; start a new run")
    for name, parameter in parameters.items():
        stored = tensors[name]
        if (stored.shape, stored.dtype) != (parameter.shape, parameter.dtype):
            raise HfpatchError(
                f"{path}: {name} is {tuple(stored.shape)} {stored.dtype}, the model's is "
                f"{tuple(parameter.shape)} {parameter.dtype}; start a new run"
            )
        parameter.data.copy_(like(stored, parameter.data))


def load_optimizer(
    checkpoint: Checkpoint, parameters: Parameters, optimizer: torch.optim.Optimizer, scheduler: LRScheduler
) -> None:
    """Restore the optimiser's moments and groups and the schedule's place."""
    for key, value in load_file(checkpoint.folder / _OPTIMIZER).items():
        name, _, entry = key.rpartition(_SEPARATOR)
        parameter = parameters[name]
        in_pieces = value.shape == parameter.shape and entry != _STEP
        optimizer.state[parameter][entry] = like(value, parameter.data) if in_pieces else value.to(parameter.device)
    state = read_json(checkpoint.folder / _STATE)
    for group, stored in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(stored)
    scheduler.load_state_dict(state["scheduler"])


def step_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and compare all its files with their hashes; HfpatchError if it is missing or damaged."""
    check_manifest(path)
    content = read_json(path / _STATE)
    try:
        survival = {group: (changed, moved) for group, (changed, moved) in content["state"]["survival"].items()}
        state = LoopState(**{**content["state"], "survival": survival})
        return Checkpoint(path, content["step"], state, dict(content["identity"]), content["resumable"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HfpatchError(f"{path / _STATE}: damaged: not the state of a run ({error!r})") from error
