"""Changes of a patch's weights in training, from two states, and the records of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.results.records import read_lines
from hfpatch.support.files import read_json
from hfpatch.surgery.folder import load_patch
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners.adapters import adapter_parameters, block_of, has_adapters, name_in_block, stack
from hfpatch.tuners.config import MethodConfig

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Movement:
    """The change of one tensor of a patch, in Frobenius norms.

    ``layer`` is the index of the block, -1 outside the blocks, and ``tensor`` the name below it. ``unmoved`` of its
    ``weights`` are the same, bit for bit. ``distance`` is ‖after − before‖.
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
    """The records of a training; missing ones are None or empty.

    ``final_loss`` is in nats a token at the last step. ``update_survival`` is the share of weights that an optimiser
    step changed, by tensor group and for ``all``.
    """

    steps: int | None = None
    final_loss: float | None = None
    update_survival: dict[str, float] = field(default_factory=dict)


def movement(before: Tensors, after: Tensors) -> list[Movement]:
    """Compare two states of one patch, tensor by tensor.

    Raises:
        HfpatchError: if they do not have the same tensors in the same shapes.
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
    """Return the tensors of a model's adapters, or of a saved patch on its base, by their names in the model.

    A patch is loaded from ``directory`` and removed again; ``allow_other_base`` takes one whose base had other weights.

    Raises:
        HfpatchError: if the patch does not fit the model, or the model has adapters already.
    """
    if directory is not None:
        load_patch(model, directory, allow_other_base=allow_other_base)
    try:
        return {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    finally:
        if directory is not None:
            unpatch(model)


def initial_tensors(
    model: nn.Module, directory: str | Path, *, seed: int | None = None, allow_other_base: bool = False
) -> dict[str, Tensor]:
    """Return the initial tensors of a saved patch: its configurations, initialised on the base with the same seed.

    ``seed`` is that of the run, from which methods that are not hfpatch's draw; without it their tensors are left out.

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
        seeded = [name for name, config in configs.items() if seed is not None or isinstance(config, MethodConfig)]
        tensors = patch_tensors(model)
        return {key: value for key, value in tensors.items() if any(f".{name}." in f".{key}." for name in seeded)}
    finally:
        unpatch(model)


def read_run(run_dir: str | Path) -> RunRecord:
    """Read the records of a training from its folder (``runs/METHOD/seed-N``).

    Raises:
        HfpatchError: if the folder has neither training.json nor metrics.jsonl.
    """
    folder = Path(run_dir)
    outcome, metrics = folder / "training.json", folder / "metrics.jsonl"
    if not outcome.is_file() and not metrics.is_file():
        raise HfpatchError(f"{folder}: no run here (neither training.json nor metrics.jsonl); give runs/METHOD/seed-N")
    steps = [step for step in read_lines(metrics, skip_broken=True) if isinstance(step, dict)]
    read: Any = read_json(outcome) if outcome.is_file() else {}
    recorded = read if isinstance(read, dict) else {}
    survival = recorded.get("update_survival")
    return RunRecord(
        steps=recorded.get("steps", steps[-1].get("step") if steps else None),
        final_loss=recorded.get("final_loss", steps[-1].get("loss") if steps else None),
        update_survival=dict(survival) if isinstance(survival, dict) else {},
    )
