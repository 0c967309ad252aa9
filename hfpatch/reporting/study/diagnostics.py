"""What the runs of a study recorded, put together over seeds: the size of f layer by layer, the spread of the loss."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hfpatch.results.schema import Diagnostic, Row, StudyResults, StudyRun

LayerPoints = Sequence[tuple[int, float | None, float | None]]
"""Step, ‖f‖/‖A‖, cosine; ascending."""


@dataclass(frozen=True)
class FSeries:
    """What f does in one variant, the mean over seeds.

    Attributes:
        variant: the variant, at its best point.
        target: query, key or value.
        layers: layer -> its points.
        seeds: how many seeds the mean is over.
    """

    variant: str
    target: str
    layers: Mapping[int, LayerPoints]
    seeds: int


def series_of(study: StudyResults) -> list[FSeries]:
    """Return a series for each variant and target that recorded one, in the order of the recipe."""
    found = []
    for row in study.chosen.values():
        runs = [run for run in _whole(study.runs_of(row)) if run.diagnostics]
        for target in dict.fromkeys(each.target for run in runs for each in run.diagnostics):
            by_layer: dict[int, dict[int, list[Diagnostic]]] = defaultdict(lambda: defaultdict(list))
            for each in (each for run in runs for each in run.diagnostics if each.target == target):
                by_layer[each.layer][each.step].append(each)
            layers = {
                layer: [
                    (step, _mean(e.size for e in at), _mean(e.cosine for e in at)) for step, at in sorted(by.items())
                ]
                for layer, by in sorted(by_layer.items())
            }
            found.append(FSeries(row.variant, target, layers, len(runs)))
    return found


def spread_of(study: StudyResults, row: Row) -> list[tuple[int, float]]:
    """Return step and standard deviation (n - 1) over seeds of the validation loss, where two seeds or more have it."""
    losses: dict[int, list[float]] = defaultdict(list)
    runs = _whole(study.runs_of(row))
    for run in runs:
        for step, loss in dict(run.evaluation).items():
            if loss is not None:
                losses[step].append(loss)
    return [(step, _deviation(values)) for step, values in sorted(losses.items()) if len(values) == len(runs) > 1]


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation (n - 1); `statistics.stdev` gives other last digits before Python 3.11."""
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _whole(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Return the runs that are complete; where none is, all, so that a mean has the same seeds at every step."""
    return [run for run in runs if run.outcome == "complete"] or list(runs)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
