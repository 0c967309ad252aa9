"""Series of a run folder: loss curves, and measurements of each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hfpatch.errors import HfpatchError
from hfpatch.results.layout import Curve, LayerSeries
from hfpatch.results.records import read_lines
from hfpatch.support.files import printable, read_json

ANALYSIS = "analysis.json"
"""Beside a run's patch, what ``hfpatch inspect MODEL --patch PATCH --json`` prints: measurement -> records."""

_LAYER = re.compile(r"\.(\d+)\.")
_PAPER_SKIP_STD = 1e-4  # arXiv 2604.10791: a skip has this norm times d before any training
_MATRICES = {
    "preproj_skip": "‖W_skip‖ of the content skip",
    "preproj_down": "‖W_down‖ of the pre-projection",
    "nonlinear_query_norm_out": "‖gain‖ behind the nonlinear query",
    "temperature_query": "‖τ‖ of the query temperature",
    "lora_B": "‖B‖ of LoRA",
}
_MEASUREMENTS = {
    ("skip_norms", "norm"): _MATRICES["preproj_skip"],
    ("skip_sizes", "size"): "‖x~ W_skip‖ / ‖attention output‖",
    ("pre_projection_sizes", "size"): "‖x~ − x‖ / ‖x‖",
    ("query_sizes", "size"): "‖f(x)‖ / ‖A(x)‖",
    ("query_sizes", "cosine"): "cosine of f(x) and A(x)",
    ("ablations", "change"): "loss added when the layer is left out",
    ("gradients", "gradient"): "‖gradient‖ of the patch's tensors",
    ("movement", "distance"): "‖W − W at init‖ of the patch's tensors",
}
QUANTITIES = tuple(dict.fromkeys([*_MATRICES.values(), *_MEASUREMENTS.values()]))
"""Every quantity, in the order of the report."""


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
                kind = next((kind for kind in _MATRICES if f".{kind}." in name), None)
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
                LayerSeries(quantity=_MATRICES[kind], group=group, points=values, reference=reference.get(kind))
                for kind, values in points.items()
            ]
    return series


def read_analyses(run_dir: Path, method: str) -> tuple[list[LayerSeries], list[str]]:
    """Return the mean over seeds of the analyses of a method's runs, and name the files that cannot be read.

    There is a series for each measurement and group that is known layer by layer.
    """
    read: list[Any] = []
    broken: list[str] = []
    for path in sorted((run_dir / "runs" / method).glob(f"seed-*/{ANALYSIS}")) if "/" not in method else ():
        try:
            read.append(printable(read_json(path)))
        except HfpatchError:
            broken.append(f"{path.relative_to(run_dir).as_posix()} cannot be read.")
    series: list[LayerSeries] = []
    for measurements, ((name, field), quantity) in product(read, _MEASUREMENTS.items()):
        points: dict[str, dict[int, float]] = {}
        reference = None
        records = measurements.get(name)
        if isinstance(records, dict):  # of which the first list has the layers
            records = next((value for value in records.values() if isinstance(value, list)), None)
        for record in records if isinstance(records, list) else ():
            if not isinstance(record, dict):
                continue
            value, layer = record.get(field), record.get("layer")
            if isinstance(value, int | float) and isinstance(layer, int):
                group = ", ".join(value for value in record.values() if isinstance(value, str))
                points.setdefault(group, {})[layer] = float(value)
                reference = record.get("at_paper_init", reference)
        series += [LayerSeries(quantity=quantity, group=group, points=values, reference=reference)
                   for group, values in points.items()]  # fmt: skip
    return mean_series(series), broken


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
