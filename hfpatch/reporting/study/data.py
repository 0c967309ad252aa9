"""The numbers of a study: what its runs recorded, put together over seeds, and all of it as CSV."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hfpatch.reporting.study.words import point_text, value_text
from hfpatch.reporting.tabular import csv_text
from hfpatch.results.schema import Diagnostic, Row, StudyResults, StudyRun

_DECIDED = ("simultaneous_low", "simultaneous_high", "p_corrected", "family", "verdict")
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
    spread = []
    for step, values in sorted(losses.items()):
        if len(values) == len(runs) > 1:  # `statistics.stdev` gives other last digits before Python 3.11
            mean = fmean(values)
            spread.append((step, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))))
    return spread


def _whole(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Return the runs that are complete; where none is, all, so that a mean has the same seeds at every step."""
    return [run for run in runs if run.outcome == "complete"] or list(runs)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def study_csv(study: StudyResults) -> str:
    """Return every run, a line each: variant, sweep point, seed, how it ended, its loss, size and cost."""
    keys = list(dict.fromkeys(key for row in study.rows for key in row.point))
    of_run = ("steps", "tokens", "wall_s", "peak_memory_bytes")
    rows = []
    for row in study.rows:
        parameters = study.variants[row.variant].parameters
        point = [value_text(row.point[key]) if key in row.point else None for key in keys]
        runs = {run.seed: run for run in study.runs_of(row)}
        losses = row.loss.values if row.loss is not None else {}
        for seed in sorted({*runs, *losses, *row.diverged, *row.missing}):
            run = runs.get(seed)
            outcome = "diverged" if seed in row.diverged else "missing" if seed in row.missing else "complete"
            ending = run.outcome if run is not None else outcome
            diverged = row.diverged.get(seed, run.diverged_step if run is not None else None)
            cost = (getattr(run.train if run is not None else None, name, None) for name in of_run)
            start = row.variant, *point, int(row.best), seed
            rows.append((*start, ending, diverged, losses.get(seed), *cost, parameters.non_embedding, parameters.total))
    headings = ("variant", *keys, "best", "seed", "outcome", "diverged_step", "validation_loss", *of_run)
    return csv_text((*headings, "non_embedding", "parameters"), rows)


def figure_csv(name: str, study: StudyResults) -> str:
    """Return the data of the figure called ``name``; of losses and improvements those of every sweep point."""
    rows: list[tuple[object, ...]] = []
    match name:
        case "differences":
            headings = ["variant", "point", "best", "improvement", "low", "high", "p", *_DECIDED]
            headings += ["seed", "improvement_of_seed"]
            for row in study.rows:
                if (found := row.improvement) is not None:
                    tested = row.best and row.variant != study.baseline
                    verdict = study.verdict(row.variant).to_json() if tested else {}
                    start = row.variant, point_text(row.point), int(row.best), found.mean, found.low, found.high
                    known = *start, found.p, *map(verdict.get, _DECIDED)
                    rows += [(*known, *each) for each in study.seed_values(row).items() or [(None, None)]]
        case "loss" | "improvement":
            headings = ["variant", "point", "step", "mean", "low", "high"]
            for row in study.rows:
                points = row.curve if name == "loss" else row.improvement_by_step
                rows += [(row.variant, point_text(row.point), *point) for point in points]
        case "diagnostics":
            headings = ["variant", "target", "layer", "step", "size", "cosine", "seeds"]
            for series in series_of(study):
                for layer, by_step in series.layers.items():
                    rows += [(series.variant, series.target, layer, *point, series.seeds) for point in by_step]
        case _:
            headings = ["variant", "step", "sd"]
            rows += [(name, *point) for name, row in study.chosen.items() for point in spread_of(study, row)]
    return csv_text(headings, rows)
