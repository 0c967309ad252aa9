"""The tables of a study's report, as text for Markdown, HTML and the terminal alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hfpatch.reporting.answer import Tone
from hfpatch.reporting.facts import settings_text
from hfpatch.reporting.numbers import NOTHING, count, decimal, diverged_text, p_text
from hfpatch.reporting.study import captions
from hfpatch.reporting.study.answer import change_of, falls_to_correction, improvement_text, share, tone_of
from hfpatch.reporting.study.diagnostics import series_of
from hfpatch.reporting.study.results import Row, StudyResults
from hfpatch.reporting.study.words import (
    and_seeds,
    key_text,
    mean_sd,
    point_text,
    seconds_text,
    share_cell,
    value_text,
)
from hfpatch.reporting.tables import FALLEN_MARK, HOLM_MARK


@dataclass(frozen=True)
class TextRow:
    """A line of a table; ``tone`` stands as a mark before the cell of the verdict, ``strong`` is set apart."""

    cells: tuple[str, ...]
    tone: Tone | None = None
    strong: bool = False


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        name: begins its anchor.
        title: what it shows.
        caption: how to read it.
        headings: one a column; the first column names the row.
        rows: the lines.
        numbers: the columns of numbers.
        verdict: the column of the verdict, if there is one.
    """

    name: str
    title: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[TextRow, ...]
    numbers: frozenset[int]
    verdict: int | None = None


def main_table(study: StudyResults) -> TextTable:
    """Build the table of the variants: configuration, parameters, loss, improvement and cost."""
    points = any(row.point for row in study.chosen.values())
    left = ("configuration", "query", *(("best point",) if points else ()))
    right = ("parameters", "to baseline", "validation loss", "improvement, %", "verdict", "p", "p (Holm)", "s/step")
    rows = tuple(_main_row(study, name, points=points) for name in study.variants)
    verdict = len(left) + 4
    numbers = frozenset(range(len(left), len(left) + len(right))) - {verdict}
    return TextTable("main", "Variants", captions.MAIN, (*left, *right), rows, numbers, verdict)


def sweep_table(study: StudyResults) -> TextTable:
    """Build the table of every point of every variant."""
    keys = tuple(dict.fromkeys(key for row in study.rows for key in row.point))
    headings = ("configuration", *map(key_text, keys), "validation loss", "seeds", "improvement, %", "s/step", "state")
    rows = tuple(
        TextRow(
            (
                row.variant,
                *(value_text(row.point[key]) if key in row.point else NOTHING for key in keys),
                loss_text(row),
                count(len(row.loss.values)) if row.loss else "0",
                _improvement(row),
                seconds_text(row.seconds_per_step),
                state_text(row),
            ),
            strong=row.best,
        )
        for row in study.rows
    )
    return TextTable("points", "Points", captions.SWEEP, headings, rows, frozenset(range(1, len(headings) - 1)))


def variant_table(study: StudyResults) -> TextTable:
    """Build the table of what each variant is."""
    headings = ("configuration", "description", "architecture", "own training settings", "parameters in all")
    rows = tuple(
        TextRow(
            (
                name,
                variant.description or NOTHING,
                settings_text(differing(study, name)) or NOTHING,
                settings_text(variant.training) or NOTHING,
                count(variant.parameters.total),
            )
        )
        for name, variant in study.variants.items()
    )
    return TextTable("variants", "Configurations", captions.VARIANTS, headings, rows, frozenset({4}))


def diagnostics_table(study: StudyResults) -> TextTable:
    """Build the table of what f does in each layer at the last step that every layer has."""
    rows = tuple(TextRow(cells) for cells in _diagnostics(study))
    headings = ("configuration", "target", "layer", "step", "‖f‖/‖A‖", "cos(f, A)", "seeds")
    return TextTable("layers", "At the last step", captions.LAST, headings, rows, frozenset(range(2, 7)))


def differing(study: StudyResults, name: str) -> dict[str, Any]:
    """Return what of a variant's architecture is not that of all."""
    common = study.common_architecture
    return {key: value for key, value in study.variants[name].architecture.items() if key not in common}


def _diagnostics(study: StudyResults) -> Iterator[tuple[str, ...]]:
    for series in series_of(study):
        for layer, points in series.layers.items():
            step, size, cosine = points[-1]
            seeds = count(series.seeds)
            yield series.variant, series.target, str(layer), count(step), _number(size), _number(cosine), seeds


def _number(value: float | None) -> str:
    return NOTHING if value is None else decimal(value, 3)


def _main_row(study: StudyResults, name: str, *, points: bool) -> TextRow:
    row, variant = study.chosen.get(name), study.variants[name]
    baseline = name == study.baseline
    base = None if baseline else study.chosen.get(study.baseline)
    tested = row.improvement if row is not None and not baseline else None
    tone = None if baseline else tone_of(row)
    cells: Sequence[str] = (
        name,
        variant.query or NOTHING,
        *((_point(row),) if points else ()),
        count(variant.parameters.non_embedding),
        NOTHING if baseline else share_cell(share(study, name)),
        loss_text(row),
        improvement_text(tested).removesuffix(" %") or NOTHING,
        "baseline" if baseline else _verdict(row, tone),
        p_text(tested.p if tested else None),
        p_text(tested.p_holm if tested else None),
        seconds_text(row.seconds_per_step if row else None, None if base is None else base.seconds_per_step),
    )
    return TextRow(tuple(cells), tone, strong=baseline)


def _point(row: Row | None) -> str:
    if row is None:
        return NOTHING
    if row.best:
        return point_text(row.point)
    return f"{point_text(row.point)} ({'seeds diverged' if row.diverged else 'so far'})"


def _verdict(row: Row | None, tone: Tone | None) -> str:
    if row is None or row.improvement is None:
        return diverged_text(row.diverged) if row is not None and row.diverged else "not compared"
    if tone in ("better", "worse"):
        return tone + (HOLM_MARK if row.improvement.p_holm is not None else ", p not corrected")
    if tone == "unknown":
        return "one seed" if change_of(row.improvement) is None else "not tested"
    return f"within noise{FALLEN_MARK if falls_to_correction(row.improvement) else ''}"


def loss_text(row: Row | None) -> str:
    """Return the loss at the end over seeds, ``4.1000 ± 0.0100``."""
    if row is None or row.loss is None:
        return NOTHING
    return mean_sd(row.loss.mean, row.loss.sd, len(row.loss.values))


def _improvement(row: Row) -> str:
    return improvement_text(row.improvement).removesuffix(" %") or NOTHING


def state_text(row: Row) -> str:
    """Return what became of a point: whether it is the best, which seeds diverged and which are missing."""
    parts = [
        *(["best"] if row.best else []),
        *([diverged_text(row.diverged)] if row.diverged else []),
        *([f"{and_seeds(row.missing)} not run yet"] if row.missing else []),
    ]
    return "; ".join(parts) or "complete"
