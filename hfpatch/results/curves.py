"""The training curve of a method, from the ``metrics.jsonl`` of its runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from hfpatch.results.schema import Curve

MOST_STEPS = 2000
"""A curve of more steps is thinned out to at most so many, those with a loss on held-out text aside."""


def mean_curve(paths: Iterable[Path]) -> Curve | None:
    """Return the mean over runs of the loss at the steps that all of them have; None where there is none.

    Args:
        paths: a ``metrics.jsonl`` for each seed; half-written lines are left out, of a step that is there twice, as
            after a resumption, the later line counts.
    """
    runs = [run for run in map(_losses, paths) if run[0]]
    if not runs:
        return None
    loss, held_out = _mean_by_step([loss for loss, _ in runs]), _mean_by_step([held_out for _, held_out in runs])
    every = -(-len(loss) // MOST_STEPS)
    steps = [step for place, step in enumerate(loss) if place % every == 0 or step in held_out]
    return (
        Curve(steps=steps, loss=[loss[step] for step in steps], seeds=len(runs), held_out=held_out) if steps else None
    )


def _losses(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return the losses of a run by step: of its batches, and on held-out text where that was measured."""
    loss: dict[int, float] = {}
    held_out: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, Mapping) and isinstance(record.get("step"), int):
            value, measured = record.get("loss"), record.get("eval_loss")
            loss[record["step"]] = float(value) if isinstance(value, int | float) else math.nan
            if isinstance(measured, int | float):
                held_out[record["step"]] = float(measured)
    return loss, held_out


def _mean_by_step(runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    return {step: fmean(run[step] for run in runs) for step in steps}
