"""Reading the training curves ``runs/<method>/seed-<s>/metrics.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    """

    steps: NDArray[np.int64]
    loss: Floats
    seeds: int


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
        curve = _mean([losses for losses in found if losses])
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


def _losses(path: Path) -> dict[int, float]:
    """Return the loss at each step; of a step told twice, as after a resume, the later line counts."""
    losses = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, Mapping) and isinstance(record.get("step"), int):
            loss = record.get("loss")
            losses[record["step"]] = float(loss) if isinstance(loss, int | float) else math.nan
    return losses


def _mean(runs: list[dict[int, float]]) -> Curve | None:
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    if not steps:
        return None
    loss = np.array([[run[step] for step in steps] for run in runs]).mean(axis=0)
    return Curve(np.array(steps, dtype=np.int64), loss, len(runs))
