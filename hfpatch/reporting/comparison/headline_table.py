"""The headline of a comparison as a table, and as columns of ``results.csv``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hfpatch.reporting.comparison.gains import Gain, Measures, Pooled
from hfpatch.reporting.comparison.headline import Headline, Line, headline
from hfpatch.reporting.document import Cell, Column, Row, Table
from hfpatch.reporting.numbers import NOTHING, Scale, change_text, count, ratio, signed
from hfpatch.results.schema import ComparisonResults

HEADLINE_COLUMNS = (
    *("rank_best", "rank_worst", "held_out_gain", "held_out_low", "held_out_high", "held_out_unit"),
    *("text_gain", "text_low", "text_high", "text_unit"),
    *("task_gain", "task_low", "task_high", "task_unit", "margin_gain", "margin_low", "margin_high", "margin_unit"),
    *("control", "verdict"),
)


def headline_table(found: Headline, *, name: str = "headline", title: str = "") -> Table:
    """Build the table that a report opens with; for narrow terminals, of gains and of verdicts.

    Args:
        found: the headline.
        name: the table's anchor.
        title: names the run where several are reported side by side.
    """
    shown, against = found.measures, f"against {found.reference}" if found.reference else "against the matched LoRA"
    gains = [("gain on held-out text", shown.text)]
    gains += [("gain on text tasks", shown.text_tasks)] if shown.text_tasks else []
    gains += [("gain on tasks", shown.tasks)]
    gains += [("gain in margin", shown.margin)] if shown.margin else []
    controls = {line.control for line in found.lines if line.ratio is not None}
    shared = controls.pop() if len(controls) == 1 else None
    columns = (
        *(Column("method"), Column("rank", number=True)),
        *(Column(heading, _notes(measure), number=True) for heading, measure in gains),
        *(Column("parameters", (f"(× {shared})",) if shared else (), number=True), Column(against)),
    )
    rows = [_row(line, shared, shown) for line in found.lines]
    halves = tuple(
        Table(
            f"{name}-{half.lower()}",
            f"{title}: {half.lower()}" if title else half,
            (columns[0], *columns[cut]),
            tuple(Row((row[0], *row[cut])) for row in rows),
        )
        for half, cut in (("Gains", slice(1, -2)), ("Verdicts", slice(-2, None)))
    )
    return Table(name, title or "Headline", columns, tuple(map(Row, rows)), heading=bool(title), narrow=halves)


def _notes(measure: Pooled | None) -> tuple[str, ...]:
    """Say what a column of gains is measured by, and on which tasks."""
    if measure is None:
        return ("not measured",)
    many = len(measure.tasks)
    known = many + measure.left_out
    over = f"mean of {many} tasks" if not measure.left_out else f"mean of {many} of {known} tasks"
    return measure.unit, over if known > 1 else measure.tasks[0] if many else "loss, without interval"


def _row(line: Line, shared: str | None, shown: Measures) -> tuple[str | Cell, ...]:
    size = ""
    if line.ratio is not None:
        size = f" ({ratio(line.ratio)} ×)" if shared else f" ({ratio(line.ratio)} × {line.control})"
    return (
        line.method,
        rank_text(line.rank),
        gain_text(line.text),
        *([gain_text(line.text_tasks)] if shown.text_tasks else []),
        gain_text(line.tasks),
        *([gain_text(line.margin)] if shown.margin else []),
        f"{count(line.trainable)}{size}",
        line.verdict if line.tone == "unknown" else Cell((line.verdict,), line.tone),
    )


def rank_text(rank: tuple[int, int] | None) -> str:
    """Format a rank, or a range of ranks as ``2–4``."""
    if rank is None:
        return NOTHING
    return str(rank[0]) if rank[0] == rank[1] else f"{rank[0]}–{rank[1]}"


def gain_text(gain: Gain | None) -> str:
    """Format a gain with its interval, if it has one."""
    if gain is None:
        return NOTHING
    if gain.is_tested:
        return change_text(gain.change, unit=False)
    return signed(gain.value, 4 if gain.change.scale is Scale.RAW else 1)


def headline_fields(results: ComparisonResults) -> Iterator[tuple[str, int, tuple[object, ...]]]:
    """Yield each method's name, its parameters and its fields under :data:`HEADLINE_COLUMNS`, in the order of ranks."""
    found = headline(results)
    shown = found.measures
    for line in found.lines:
        gains = (line.text, line.text_tasks, line.tasks, line.margin)
        measures = (shown.text, shown.text_tasks, shown.tasks, shown.margin)
        numbers = [field for pair in zip(gains, measures, strict=True) for field in _numbers(*pair)]
        yield line.method, line.trainable, (*(line.rank or (None, None)), *numbers, line.control, line.verdict)


def _numbers(gain: Gain | None, measure: Pooled | None) -> tuple[object, ...]:
    if gain is None or measure is None:
        return (None,) * 4
    ends = (end if math.isfinite(end) else None for end in (gain.change.low, gain.change.high))
    return gain.value, *ends, measure.unit
