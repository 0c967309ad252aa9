"""Series of a run folder: loss curves, and measurements of each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import numpy as np
from safetensors import SafetensorError, safe_open

from hfpatch.results.layout import Curve, LayerSeries
from hfpatch.results.records import read_lines
from hfpatch.support.files import printable

_LAYER = re.compile(r"\.(\d+)\.")
_PAPER_SKIP_STD = 1e-4  # arXiv 2604.10791: a skip has this norm times d before any training
QUANTITIES = {
    "preproj_skip": "‖W_skip‖ of the content skip",
    "preproj_down": "‖W_down‖ of the pre-projection",
    "nonlinear_query_norm_out": "‖gain‖ behind the nonlinear query",
    "temperature_query": "‖τ‖ of the query temperature",
    "lora_B": "‖B‖ of LoRA",
}
"""The tensors of patches whose norms a report shows, in its order: name -> quantity."""


def mean_series(runs: Iterable[LayerSeries]) -> list[LayerSeries]:
    """Return the mean over runs of each quantity and group, at every layer over the runs that have it."""
    by_group: dict[tuple[str, str], list[LayerSeries]] = {}
    for series in runs:
        by_group.setdefault((series.quantity, series.group), []).append(series)
    means = []
    for group in by_group.values():
        layers = sorted({layer for series in group for layer in series.points})
        points = {at: fmean(series.points[at] for series in group if at in series.points) for at in layers}
        means.append(group[0].model_copy(update={"points": points}))
    return means


def patch_norms(patch: Path) -> list[LayerSeries]:
    """Return the Frobenius norm of each layer's matrices that are zero, or tiny, before any training.

    A file that cannot be read, or whose dtype numpy does not know, as bfloat16, has none.
    """
    series: list[LayerSeries] = []
    for path in sorted(patch.glob("*/adapter_model.safetensors")):
        points: dict[str, dict[int, float]] = {}
        reference: dict[str, float] = {}
        with suppress(SafetensorError, OSError, TypeError), safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                kind = next((kind for kind in QUANTITIES if f".{kind}." in name), None)
                match = _LAYER.search(name)
                if kind is None or match is None:
                    continue
                layer, values = int(match[1]), points.setdefault(kind, {})
                squares = float(np.sum(np.square(file.get_tensor(name), dtype=np.float64)))
                values[layer] = math.hypot(values.get(layer, 0.0), math.sqrt(squares))
                if kind == "preproj_skip":
                    reference[kind] = _PAPER_SKIP_STD * file.get_slice(name).get_shape()[0]
            group = printable(path.parent.name)
            series += [
                LayerSeries(quantity=QUANTITIES[kind], group=group, points=values, reference=reference.get(kind))
                for kind, values in points.items()
            ]
    return series


MOST_STEPS = 2000
"""A curve of more steps is thinned out to about as many; steps with a loss on held-out text are kept."""


def mean_curve(paths: Iterable[Path]) -> Curve | None:
    """Return the mean over runs of the loss at the steps that all of them have; None where there is none.

    Args:
        paths: a ``metrics.jsonl`` for each seed; half-written lines are left out, of a step that is there twice, as
            after a resumption, the later line counts.
    """
    # The losses of each run by step: of its batches, and on held-out text where that was measured
    runs: list[tuple[dict[int, float], dict[int, float]]] = []
    for path in paths:
        loss, held_out = {}, {}
        for record in read_lines(path, skip_broken=True):
            if isinstance(record, Mapping) and isinstance(record.get("step"), int):
                value, measured = record.get("loss"), record.get("eval_loss")
                if record["step"]:  # before the first there is none
                    loss[record["step"]] = float(value) if isinstance(value, int | float) else math.nan
                if isinstance(measured, int | float):
                    held_out[record["step"]] = float(measured)
        if loss:
            runs.append((loss, held_out))

    if not runs:
        return None
    means = []
    for losses in zip(*runs, strict=True):
        common = sorted(set.intersection(*map(set, losses)))
        means.append({step: fmean(run[step] for run in losses) for step in common})
    loss, held_out = means
    every = -(-len(loss) // MOST_STEPS)
    steps = [step for index, step in enumerate(loss) if index % every == 0 or step in held_out]
    if not steps:
        return None
    return Curve(steps=steps, loss=[loss[step] for step in steps], seeds=len(runs), held_out=held_out)
