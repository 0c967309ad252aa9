"""Which weights of a patch moved in training: two patches compared with each other, and what a run wrote down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.support.files import read_json
from hfpatch.surgery.folder import load_patch
from hfpatch.surgery.patch import patch, stack, unpatch
from hfpatch.tuners.adapters import adapter_parameters, block_of, has_adapters, name_in_block
from hfpatch.tuners.config import SurgeryConfig

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Movement:
    """How far one tensor of a patch moved.

    Attributes:
        layer: index of the block; -1 outside the blocks.
        tensor: the tensor's name below the block.
        weights: how many numbers it holds.
        unmoved: how many of them are the same, bit for bit.
        distance: ‖after − before‖ in the Frobenius norm.
        before: ‖before‖.
        after: ‖after‖.
    """

    layer: int
    tensor: str
    weights: int
    unmoved: int
    distance: float
    before: float
    after: float


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder tells of its training; what is not there is None or empty.

    Attributes:
        steps: optimiser steps.
        final_loss: nats a token at the last step.
        update_survival: share of weights that an optimiser step really changed, by tensor group and for ``all``.
        gradient_norms: the gradient's norm at each step, where metrics.jsonl has it as ``grad_norm``.
    """

    steps: int | None = None
    final_loss: float | None = None
    update_survival: dict[str, float] = field(default_factory=dict)
    gradient_norms: dict[int, float] = field(default_factory=dict)


def movement(before: Tensors, after: Tensors) -> list[Movement]:
    """Compare two states of one patch, tensor by tensor.

    Raises:
        HfpatchError: if they do not hold the same tensors in the same shapes.
    """
    if different := sorted(before.keys() ^ after.keys()):
        raise HfpatchError(f"the two patches differ in their tensors: {different[0]} is only in one of them")
    moved = []
    for name, old in before.items():
        new = after[name]
        if old.shape != new.shape:
            raise HfpatchError(f"{name} is {tuple(old.shape)} in one patch and {tuple(new.shape)} in the other")
        same = int((old == new.to(old.dtype)).sum())
        norms = (float(tensor.double().norm()) for tensor in (new.double() - old.double(), old, new))
        moved.append(Movement(block_of(name), name_in_block(name), old.numel(), same, *norms))
    return moved


def patch_tensors(
    model: nn.Module, directory: str | Path | None = None, *, allow_other_base: bool = False
) -> dict[str, Tensor]:
    """Return the tensors that a patch holds, by their names in the model.

    Args:
        model: patched, or the base of the patch in ``directory``, which is put on and taken off again.
        directory: what ``save_patch`` wrote; None takes what is on the model.
        allow_other_base: take a patch whose base had other weights.

    Raises:
        HfpatchError: if the patch does not fit the model, or the model holds adapters already.
    """
    if directory is None:
        return _copies(model)
    load_patch(model, directory, allow_other_base=allow_other_base)
    try:
        return _copies(model)
    finally:
        unpatch(model)


def initial_tensors(
    model: nn.Module, directory: str | Path, *, seed: int | None = None, allow_other_base: bool = False
) -> dict[str, Tensor]:
    """Return the tensors that a saved patch began with: its configurations, initialised again with the same seed.

    Of hfpatch's own methods the seed stands in the patch. Other methods draw from the seed of the run, so their tensors
    are left out unless it is given.

    Args:
        model: the base, without adapters; left as it was.
        directory: what ``save_patch`` wrote.
        seed: the run's seed.
        allow_other_base: take a patch whose base had other weights.

    Raises:
        HfpatchError: if the patch does not fit the model.
    """
    if has_adapters(model):
        raise HfpatchError("the model has adapters already; call hfpatch.unpatch(model) first")
    load_patch(model, directory, allow_other_base=allow_other_base)
    configs = stack(model)
    unpatch(model)
    for config in configs.values():
        config.inference_mode = False
    patch(model, list(configs.values()), names=list(configs), seed=seed)
    try:
        known = [name for name, config in configs.items() if seed is not None or isinstance(config, SurgeryConfig)]
        return {key: value for key, value in _copies(model).items() if any(f".{name}." in f".{key}." for name in known)}
    finally:
        unpatch(model)


def read_run(run_dir: str | Path) -> RunRecord:
    """Read what the folder of one run (``runs/METHOD/seed-N``) tells of its training.

    Raises:
        HfpatchError: if it holds neither training.json nor metrics.jsonl.
    """
    folder = Path(run_dir)
    outcome, metrics = folder / "training.json", folder / "metrics.jsonl"
    if not outcome.is_file() and not metrics.is_file():
        raise HfpatchError(f"{folder}: no run here (neither training.json nor metrics.jsonl); give runs/METHOD/seed-N")
    told: Any = read_json(outcome) if outcome.is_file() else {}
    told = told if isinstance(told, dict) else {}
    survival = told.get("update_survival")
    lines = list(_lines(metrics)) if metrics.is_file() else []
    return RunRecord(
        steps=told.get("steps", len(lines) or None),
        final_loss=told.get("final_loss", lines[-1].get("loss") if lines else None),
        update_survival=dict(survival) if isinstance(survival, dict) else {},
        gradient_norms={line["step"]: line["grad_norm"] for line in lines if "grad_norm" in line and "step" in line},
    )


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in adapter_parameters(model).items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of metrics.jsonl; one that a crash cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
