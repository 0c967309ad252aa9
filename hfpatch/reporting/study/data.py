"""The numbers of a study as CSV: every run, and those behind each figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hfpatch.reporting.study.diagnostics import series_of, spread_of
from hfpatch.reporting.study.words import point_text, value_text
from hfpatch.reporting.tabular import csv_text
from hfpatch.results.schema import ByStep, Row, StudyResults

_DECIDED = ("simultaneous_low", "simultaneous_high", "p_corrected", "family", "verdict")
_BY_STEP = ("variant", "point", "step", "mean", "low", "high")


def study_csv(study: StudyResults) -> str:
    """Return every run, a line each: variant, sweep point, seed, how it ended, its loss, size and cost."""
    keys = list(dict.fromkeys(key for row in study.rows for key in row.point))
    headings = ("variant", *keys, "best", "seed", "outcome", "diverged_step", "validation_loss", "steps", "tokens")
    return csv_text((*headings, "wall_s", "peak_memory_bytes", "non_embedding", "parameters"), _runs(study, keys))


def _runs(study: StudyResults, keys: Sequence[str]) -> Iterator[tuple[object, ...]]:
    for row in study.rows:
        parameters = study.variants[row.variant].parameters
        runs = {run.seed: run for run in study.runs_of(row)}
        losses = row.loss.values if row.loss is not None else {}
        for seed in sorted({*runs, *losses, *row.diverged, *row.missing}):
            run = runs.get(seed)
            without_run = "diverged" if seed in row.diverged else "missing" if seed in row.missing else "complete"
            train = run.train if run is not None else None
            yield (
                row.variant,
                *(value_text(row.point[key]) if key in row.point else None for key in keys),
                int(row.best),
                seed,
                run.outcome if run is not None else without_run,
                row.diverged.get(seed, run.diverged_step if run is not None else None),
                losses.get(seed),
                *(getattr(train, name, None) for name in ("steps", "tokens", "wall_s", "peak_memory_bytes")),
                parameters.non_embedding,
                parameters.total,
            )


def figure_csv(name: str, study: StudyResults) -> str:
    """Return the data of the figure called ``name``; of losses and improvements those of every sweep point."""
    match name:
        case "differences":
            statistics = ("improvement", "low", "high", "p", *_DECIDED)
            headings = ("variant", "point", "best", *statistics, "seed", "improvement_of_seed")
            return csv_text(headings, _differences(study))
        case "loss":
            return csv_text(_BY_STEP, _by_step((row, row.curve) for row in study.rows))
        case "improvement":
            return csv_text(_BY_STEP, _by_step((row, row.improvement_by_step) for row in study.rows))
        case "diagnostics":
            return csv_text(("variant", "target", "layer", "step", "size", "cosine", "seeds"), _diagnostics(study))
        case _:
            spreads = ((name, *point) for name, row in study.chosen.items() for point in spread_of(study, row))
            return csv_text(("variant", "step", "sd"), spreads)


def _differences(study: StudyResults) -> Iterator[tuple[object, ...]]:
    for row in study.rows:
        if (found := row.improvement) is not None:
            tested = row.best and row.variant != study.baseline
            verdict = study.verdict(row.variant).to_json() if tested else {}
            statistics = (found.mean, found.low, found.high, found.p, *(verdict.get(key) for key in _DECIDED))
            seeds: list[tuple[int | None, float | None]] = [*study.seed_values(row).items()]
            for seed, value in seeds or [(None, None)]:
                yield (row.variant, point_text(row.point), int(row.best), *statistics, seed, value)


def _by_step(statistics: Iterable[tuple[Row, ByStep]]) -> Iterator[tuple[object, ...]]:
    for row, points in statistics:
        for point in points:
            yield (row.variant, point_text(row.point), *point)


def _diagnostics(study: StudyResults) -> Iterator[tuple[object, ...]]:
    for series in series_of(study):
        for layer, points in series.layers.items():
            for point in points:
                yield (series.variant, series.target, layer, *point, series.seeds)
