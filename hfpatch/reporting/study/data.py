"""The numbers behind a study's figures, and all of its results, as CSV."""

from __future__ import annotations

from collections.abc import Iterator

from hfpatch.reporting.figure_data import csv_text
from hfpatch.reporting.study.diagnostics import series_of, spread_of
from hfpatch.reporting.study.results import ByStep, Row, StudyResults
from hfpatch.reporting.study.words import point_text, value_text

_BY_STEP = ("variant", "point", "step", "mean", "low", "high")


def study_csv(study: StudyResults) -> str:
    """Return every run, a line each: variant, sweep point, seed, how it ended, its loss, size and cost."""
    keys = list(dict.fromkeys(key for row in study.rows for key in row.point))
    headings = ("variant", *keys, "best", "seed", "outcome", "diverged_step", "validation_loss", "steps", "tokens")
    return csv_text((*headings, "wall_s", "peak_memory_bytes", "non_embedding", "parameters"), _runs(study, keys))


def _runs(study: StudyResults, keys: list[str]) -> Iterator[tuple[object, ...]]:
    for row in study.rows:
        parameters = study.variants[row.variant].parameters
        runs = {run.seed: run for run in study.runs_of(row)}
        losses = row.loss.values if row.loss is not None else {}
        for seed in sorted({*runs, *losses, *row.diverged, *row.missing}):
            run = runs.get(seed)
            train = run.train if run is not None else None
            yield (
                row.variant,
                *(value_text(row.point[key]) if key in row.point else None for key in keys),
                int(row.best),
                seed,
                run.outcome if run is not None else "diverged" if seed in row.diverged else _outcome(row, seed),
                row.diverged.get(seed, run.diverged_step if run is not None else None),
                losses.get(seed),
                *(getattr(train, name, None) for name in ("steps", "tokens", "wall_s", "peak_memory_bytes")),
                parameters.non_embedding,
                parameters.total,
            )


def _outcome(row: Row, seed: int) -> str:
    return "missing" if seed in row.missing else "complete"


def figure_csv(name: str, study: StudyResults) -> str:
    """Return the data of the figure called ``name``; of losses and improvements those of every sweep point."""
    made = {
        "differences": _differences,
        "loss": lambda s: csv_text(_BY_STEP, _by_step(s, "curve")),
        "improvement": lambda s: csv_text(_BY_STEP, _by_step(s, "improvement_by_step")),
        "diagnostics": _diagnostics,
        "spread": _spread,
    }
    return made[name](study)


def _differences(study: StudyResults) -> str:
    headings = ("variant", "point", "best", "improvement", "low", "high", "p", "p_holm", "seed", "improvement_of_seed")
    return csv_text(headings, _differences_of(study))


def _differences_of(study: StudyResults) -> Iterator[tuple[object, ...]]:
    for row in study.rows:
        each = row.improvement
        if each is not None:
            told = (
                row.variant,
                point_text(row.point),
                int(row.best),
                each.mean,
                each.low,
                each.high,
                each.p,
                each.p_holm,
            )
            seeds: list[tuple[int | None, float | None]] = [*study.seed_values(row).items()]
            for seed, value in seeds or [(None, None)]:
                yield (*told, seed, value)


def _by_step(study: StudyResults, field: str) -> Iterator[tuple[object, ...]]:
    for row in study.rows:
        points: ByStep = getattr(row, field)
        for point in points:
            yield (row.variant, point_text(row.point), *point)


def _diagnostics(study: StudyResults) -> str:
    rows = (
        (series.variant, series.target, layer, *point, series.seeds)
        for series in series_of(study)
        for layer, points in series.layers.items()
        for point in points
    )
    return csv_text(("variant", "target", "layer", "step", "size", "cosine", "seeds"), rows)


def _spread(study: StudyResults) -> str:
    rows = ((name, *point) for name, row in study.chosen.items() for point in spread_of(study, row))
    return csv_text(("variant", "step", "sd"), rows)
