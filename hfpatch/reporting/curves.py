"""Reading the training curves ``runs/<method>/seed-<s>/metrics.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A method's training loss, the mean over its seeds.

    Attributes:
        steps: the optimiser steps that every seed has, ascending.
        loss: the mean loss at each of them.
        seeds: how many seeds there are.
        held_out: the mean loss on held-out text, by the steps after which every seed measured it.
    """

    steps: NDArray[np.int64]
    loss: Floats
    seeds: int
    held_out: Mapping[int, float] = field(default_factory=dict)


def read_curves(run_dir: Path, methods: list[str]) -> dict[str, Curve]:
    """Read the curves of those methods that have one; half-written lines are left out."""
    runs = run_dir / "runs"
    folders = {path.name: path for path in runs.iterdir()} if runs.is_dir() else {}
    curves = {}
    for method in methods:
        found = (
            [_losses(path) for path in sorted(folders[method].glob("seed-*/metrics.jsonl"))]
            if method in folders
            else []
        )
        curve = _mean([run for run in found if run.loss])
        if curve is not None:
            curves[method] = curve
    return curves


def smooth(values: Floats, window: int) -> Floats:
    """Return the centred running mean over ``window`` values; at the ends over what there is."""
    if window <= 1 or not values.size:
        return values
    total = np.concatenate([[0.0], np.cumsum(values)])
    centre = np.arange(values.size)
    start = np.maximum(centre - window // 2, 0)
    stop = np.minimum(centre + (window - 1) // 2 + 1, values.size)
    mean: Floats = (total[stop] - total[start]) / (stop - start)
    return mean


@dataclass(frozen=True)
class _Run:
    """One run's losses by step."""

    loss: dict[int, float]
    held_out: dict[int, float]


def _losses(path: Path) -> _Run:
    """Return the losses at each step; of a step told twice, as after a resume, the later line counts."""
    found = _Run({}, {})
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, Mapping) and isinstance(record.get("step"), int):
            loss, held_out = record.get("loss"), record.get("eval_loss")
            found.loss[record["step"]] = float(loss) if isinstance(loss, int | float) else math.nan
            if isinstance(held_out, int | float):
                found.held_out[record["step"]] = float(held_out)
    return found


def _mean(runs: list[_Run]) -> Curve | None:
    loss = _mean_by_step([run.loss for run in runs])
    if not loss:
        return None
    steps = np.array(list(loss), dtype=np.int64)
    return Curve(steps, np.array(list(loss.values())), len(runs), _mean_by_step([run.held_out for run in runs]))


def _mean_by_step(runs: list[dict[int, float]]) -> dict[int, float]:
    """Return the mean over runs at the steps that all of them have, ascending."""
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    return {step: float(np.mean([run[step] for run in runs])) for step in steps}
