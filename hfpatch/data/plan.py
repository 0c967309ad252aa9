"""The batch plan: the blocks of every optimiser step, drawn once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hfpatch.data.blocks import TokenBlocks
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import check_plan_size, split_by_weight
from hfpatch.recipes.training import LoopSettings
from hfpatch.support.files import atomic_file, read_json, write_json

PLAN = "plan.json"
PLAN_ARRAYS = "plan.safetensors"


@dataclass(frozen=True)
class BatchPlan:
    """The block indices of every step, (steps, batch_size) int64, the same for every method and process count.

    ``blocks`` is the number of blocks of the data, ``seed`` that of the draw.
    """

    indices: npt.NDArray[np.int64]
    blocks: int
    seed: int

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return int(self.indices.shape[0])

    @property
    def batch_size(self) -> int:
        """Blocks a step."""
        return int(self.indices.shape[1])

    @cached_property
    def sha256(self) -> str:
        """Hash of the shape, the number of blocks and the indices."""
        digest = hashlib.sha256(f"hfpatch batch plan {self.indices.shape} of {self.blocks}\n".encode())
        digest.update(np.ascontiguousarray(self.indices, dtype="<i8").data)
        return digest.hexdigest()


def write_plans(folder: Path, plans: Mapping[int, BatchPlan]) -> None:
    """Write the plan of each seed: a description to ``plan.json``, the indices to ``plan.safetensors``.

    The indices of a seed are one tensor (steps, batch_size), with 32 bits per index if that is enough.

    Raises:
        HfpatchError: if they cannot be written.
    """
    kind = np.int32 if all(plan.blocks <= np.iinfo(np.int32).max for plan in plans.values()) else np.int64
    with atomic_file(folder / PLAN_ARRAYS) as temporary:
        save_file({str(seed): plan.indices.astype(kind) for seed, plan in plans.items()}, temporary)
    names = ("seed", "blocks", "steps", "batch_size", "sha256")
    described = {str(seed): {name: getattr(plan, name) for name in names} for seed, plan in plans.items()}
    write_json(folder / PLAN, described)


def read_plans(folder: Path) -> dict[int, BatchPlan]:
    """Read the files of `write_plans`.

    Raises:
        HfpatchError: if a file is missing or not a plan, or was changed.
    """
    path, plans = folder / PLAN, dict[int, BatchPlan]()
    try:
        described = read_json(path)
        arrays = load_file(folder / PLAN_ARRAYS)
        for seed, value in described.items():
            plan = BatchPlan(arrays[seed].astype(np.int64), blocks=int(value["blocks"]), seed=int(value["seed"]))
            if plan.sha256 != value["sha256"]:
                raise HfpatchError(f"{path}: the batch plan is damaged (its hash does not match)")
            plans[int(seed)] = plan
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        # every run's identity has the hash of its plan, so that another one is refused
        reason = str(error) if isinstance(error, HfpatchError) else f"{path}: not a batch plan ({error})"
        raise HfpatchError(f"{reason}; restore it, or delete it, and --resume draws it again") from error
    return plans


def draw_plan(
    *, blocks: int, steps: int, batch_size: int, seed: int, parts: Sequence[tuple[int, float]] = ()
) -> BatchPlan:
    """Draw a plan: complete permutations of the blocks, one after the other, cut into batches.

    Every block is seen once before any is seen again; in a mixture this holds for each source. Each source has its
    share of all places by its weight, to the nearest block, and the places are drawn too. The generator is numpy's
    PCG64.

    ``parts`` are the number of blocks and the weight of each source of a mixture, in the order of their blocks.

    Raises:
        HfpatchError: if the blocks do not fill one batch, or the plan would be too long.
    """
    check_plan_size(steps, batch_size)
    if blocks < batch_size:
        raise HfpatchError(
            f"the data gives {blocks} blocks, fewer than one batch of {batch_size}; "
            "use more documents, a smaller data.block_size or a smaller training.batch_size"
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    order = np.empty(steps * batch_size, dtype=np.int64)
    positions, first = [np.arange(len(order))], 0  # of each source
    if parts:
        shares = split_by_weight(len(order), [weight for _, weight in parts])
        source = generator.permutation(np.repeat(np.arange(len(parts)), shares))
        positions = [np.flatnonzero(source == number) for number in range(len(parts))]
    for size, at in zip([size for size, _ in parts] or [blocks], positions, strict=True):
        for start in range(0, len(at), size):
            order[at[start : start + size]] = first + generator.permutation(size)[: len(at) - start]
        first += size
    return BatchPlan(indices=order.reshape(steps, batch_size), blocks=blocks, seed=seed)


def draw_plans(settings: LoopSettings, blocks: TokenBlocks, seeds: Iterable[int]) -> dict[int, BatchPlan]:
    """Draw the plan of each seed, see `draw_plan`."""
    steps, size = settings.steps, settings.batch_size
    parts = [(part.blocks, part.weight) for part in blocks.parts]
    return {seed: draw_plan(blocks=len(blocks), steps=steps, batch_size=size, seed=seed, parts=parts) for seed in seeds}
