"""What is known layer by layer: records of an analysis, and the norms of a patch's matrices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hfpatch.errors import HfpatchError
from hfpatch.reporting.results import Results, plain
from hfpatch.support.files import read_json

ANALYSIS = "analysis.json"
"""Beside a run's patch, what ``hfpatch inspect MODEL --patch PATCH --json`` prints: measurement -> records."""

_LAYER = re.compile(r"\.(\d+)\.")
_PAPER_SKIP_STD = 1e-4  # arXiv 2604.10791: a skip has this norm times d before any training
_MATRICES = {
    "preproj_skip": "‖W_skip‖ of the content skip",
    "preproj_down": "‖W_down‖ of the pre-projection",
    "nonlinear_query_norm_out": "‖gain‖ behind the nonlinear query",
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
_REFERENCE = "at_paper_init"

Points = Mapping[int, float]


@dataclass(frozen=True)
class LayerSeries:
    """One quantity of one method, layer by layer, the mean over seeds.

    Attributes:
        quantity: what it is.
        method: the method.
        group: what tells several series of one method apart (an adapter, a target), or nothing.
        points: layer -> value.
        reference: a value to hold them against, such as that at the paper's init.
    """

    quantity: str
    method: str
    group: str
    points: Points
    reference: float | None = None


def read_layers(run_dir: Path, results: Results) -> tuple[list[LayerSeries], list[str]]:
    """Read every series of a run, and name what cannot be read."""
    found: dict[tuple[str, str, str], list[tuple[Points, float | None]]] = {}
    broken: list[str] = []
    for folder in sorted((run_dir / "runs").glob("*/seed-*")):
        method = folder.parent.name
        if method in results.methods:
            for series in (*_analysed(folder, method, broken), *_norms(folder / "patch", method, broken)):
                key = (series.quantity, method, series.group)
                found.setdefault(key, []).append((series.points, series.reference))
    order = {name: place for place, name in enumerate([*_MATRICES.values(), *_MEASUREMENTS.values(), *results.methods])}
    made = [LayerSeries(*key, _mean([points for points, _ in all]), all[0][1]) for key, all in found.items()]
    return sorted(made, key=lambda s: (order[s.quantity], order[s.method], s.group)), broken


def _mean(all: Sequence[Points]) -> dict[int, float]:
    layers = sorted({layer for points in all for layer in points})
    return {layer: float(np.mean([points[layer] for points in all if layer in points])) for layer in layers}


def _analysed(folder: Path, method: str, broken: list[str]) -> Iterator[LayerSeries]:
    """Yield a series for each measurement and group of ``analysis.json`` that is known layer by layer."""
    if not (folder / ANALYSIS).is_file():
        return
    try:
        measurements = plain(read_json(folder / ANALYSIS))
    except HfpatchError:
        measurements = None
    if not isinstance(measurements, dict):
        broken.append(f"runs/{method}/{folder.name}/{ANALYSIS} cannot be read.")
        return
    for (name, field), quantity in _MEASUREMENTS.items():
        points: dict[str, dict[int, float]] = {}
        reference = None
        for record in _records(measurements.get(name)):
            value, layer = record.get(field), record.get("layer")
            if isinstance(value, int | float) and isinstance(layer, int) and np.isfinite(value):
                group = ", ".join(value for value in record.values() if isinstance(value, str))
                points.setdefault(group, {})[layer] = float(value)
                reference = record.get(_REFERENCE, reference)
        for group, values in points.items():
            yield LayerSeries(quantity, method, group, values, reference)


def _records(measurement: Any) -> list[dict[str, Any]]:
    """Return a measurement's records: itself, or the first list that it holds."""
    if isinstance(measurement, dict):
        measurement = next((value for value in measurement.values() if isinstance(value, list)), None)
    return [each for each in measurement if isinstance(each, dict)] if isinstance(measurement, list) else []


def _norms(patch: Path, method: str, broken: list[str]) -> list[LayerSeries]:
    """Return the Frobenius norm of each layer's matrices that are zero, or tiny, before any training."""
    found: list[LayerSeries] = []
    for path in sorted(patch.glob("*/adapter_model.safetensors")):
        try:
            found += _file_norms(path, method)
        except (SafetensorError, OSError, TypeError):  # numpy has no bfloat16
            broken.append(
                f"{path.relative_to(patch.parents[3]).as_posix()} cannot be read, so its norms are not shown."
            )
    return found


def _file_norms(path: Path, method: str) -> Iterator[LayerSeries]:
    points: dict[str, dict[int, float]] = {}
    reference: dict[str, float] = {}
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            kind = next((kind for kind in _MATRICES if f".{kind}." in name), None)
            layer = _LAYER.search(name)
            if kind is None or layer is None:
                continue
            squares = float(np.sum(np.square(file.get_tensor(name), dtype=np.float64)))
            values = points.setdefault(kind, {})
            values[int(layer[1])] = float(np.hypot(values.get(int(layer[1]), 0.0), np.sqrt(squares)))
            if kind == "preproj_skip":
                reference[kind] = _PAPER_SKIP_STD * file.get_slice(name).get_shape()[0]
    for kind, values in points.items():
        yield LayerSeries(_MATRICES[kind], method, plain(path.parent.name), values, reference.get(kind))
