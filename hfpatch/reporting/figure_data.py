"""The numbers behind each figure as CSV, for those who want to draw it again."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from hfpatch.reporting.curves import Curve
from hfpatch.reporting.layers import LayerSeries
from hfpatch.reporting.results import Results

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_FEWEST_STEPS, _MOST_STEPS = 50, 500
_MOST_LINES = 40_000
_TRAINING = ("method", "step", "loss", "seeds", "held_out")
_LAYERS = ("quantity", "method", "group", "layer", "value", "reference")


def csv_text(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV; None becomes an empty field, text that a spreadsheet takes for a formula gets a quote."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_as_text(field) for field in row] for row in rows)
    return text.getvalue()


def _as_text(field: object) -> object:
    return f"'{field}" if isinstance(field, str) and field.startswith(_FORMULA) else field


def differences_csv(results: Results) -> str:
    """Return every paired comparison, in the metrics' own units."""
    fields = [
        "method",
        "reference",
        "task",
        "metric",
        "difference",
        "low",
        "high",
        "p",
        "p_holm",
        "smallest_visible",
        "n",
        "seeds",
        "test",
        "verdict",
    ]
    return csv_text(fields, ([getattr(each, field) for field in fields] for each in results.comparisons))


def quality_csv(results: Results) -> str:
    """Return each method's trainable parameters and its primary metric of every task and seed."""
    rows = (
        [name, method.trainable, task, info.primary, seed, run.evaluation[task].metrics.get(info.primary)]
        for name, method in results.methods.items()
        for task, info in results.tasks.items()
        for seed, run in sorted(method.runs.items())
        if task in run.evaluation
    )
    return csv_text(("method", "trainable", "task", "metric", "seed", "value"), rows)


def training_csv(curves: Mapping[str, Curve]) -> str:
    """Return the loss of every method, at most 500 steps of each, fewer where there are many methods."""
    most = max(_FEWEST_STEPS, min(_MOST_STEPS, _MOST_LINES // max(1, len(curves))))
    rows = (
        [name, step, loss, curve.seeds, curve.held_out.get(step)]
        for name, curve in curves.items()
        for place, (step, loss) in enumerate(zip(curve.steps.tolist(), curve.loss.tolist(), strict=True))
        if place % -(-len(curve.steps) // most) == 0 or step in curve.held_out
    )
    return csv_text(_TRAINING, rows)


def layers_csv(series: Sequence[LayerSeries]) -> str:
    """Return every series, a line a layer."""
    rows = (
        [each.quantity, each.method, each.group, layer, value, each.reference]
        for each in series
        for layer, value in sorted(each.points.items())
    )
    return csv_text(_LAYERS, rows)


def figure_data(name: str, results: Results, curves: Mapping[str, Curve], layers: Sequence[LayerSeries]) -> str:
    """Return the data of the figure called ``name``."""
    if name == "training":
        return training_csv(curves)
    if name == "layers":
        return layers_csv(layers)
    return differences_csv(results) if name == "differences" else quality_csv(results)


def read_training_csv(path: Path, methods: Iterable[str]) -> dict[str, Curve]:
    """Read the curves that an earlier report wrote, for a folder whose runs are no longer with it."""
    found: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    held_out: dict[str, dict[int, float]] = defaultdict(dict)
    for row in _rows(path, _TRAINING):
        with suppress(ValueError, TypeError):  # a line that someone broke
            step, name = int(row["step"]), row["method"]
            if row["held_out"]:
                held_out[name][step] = float(row["held_out"])
            found[name].append((step, float(row["loss"]), int(row["seeds"])))
    return {name: _curve(found[name], held_out[name]) for name in methods if found.get(name)}


def _curve(points: Sequence[tuple[int, float, int]], held_out: Mapping[int, float]) -> Curve:
    steps, loss, seeds = zip(*points, strict=True)
    return Curve(np.array(steps, dtype=np.int64), np.array(loss), seeds[0], held_out)


def read_layers_csv(path: Path, methods: Iterable[str]) -> list[LayerSeries]:
    """Read the series that an earlier report wrote; otherwise as :func:`read_training_csv`."""
    points: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    references: dict[tuple[str, str, str], float | None] = {}
    known = set(methods)
    for row in _rows(path, _LAYERS):
        key = (row["quantity"], row["method"], row["group"])
        with suppress(ValueError, TypeError):
            references[key] = float(row["reference"]) if row["reference"] else None
            points[key][int(row["layer"])] = float(row["value"])
    return [LayerSeries(*key, values, references[key]) for key, values in points.items() if key[1] in known]


def _rows(path: Path, headings: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the lines of a CSV file that these headings begin; none where there is no such file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        if tuple(reader.fieldnames or ()) == tuple(headings):
            yield from ({key: _as_written(value) for key, value in row.items()} for row in reader)


def _as_written(field: str) -> str:
    return field[1:] if field[:1] == "'" and field[1:].startswith(_FORMULA) else field
