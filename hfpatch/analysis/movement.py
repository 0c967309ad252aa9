"""Changes of a patch's weights in training, from two states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
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
