"""The headline of a comparison as a table, and as columns of ``results.csv``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hfpatch.reporting.comparison.headline import Gain, Headline, Line, Measure, headline
from hfpatch.reporting.document import Cell, Column, Row, Table
from hfpatch.reporting.numbers import NOTHING, Scale, change_text, count, signed
from hfpatch.results.schema import ComparisonResults

HEADLINE_COLUMNS = (
    *("rank_best", "rank_worst", "held_out_gain", "held_out_low", "held_out_high", "held_out_unit"),
    *("task_gain", "task_low", "task_high", "task_unit", "control", "verdict"),
)


def headline_table(found: Headline, *, name: str = "headline", title: str = "") -> Table:
    """Build the table that a report opens with; for narrow terminals, of gains and of verdicts.

    Args:
        found: the headline.
        name: the table's anchor.
        title: names the run where several are reported side by side.
    """
    against = f"against {found.reference}" if found.reference else "against the matched LoRA"
    columns = (
        Column("method"),
        Column("rank", number=True),
        Column("gain on held-out text", _notes(found.text), number=True),
        Column("gain on tasks", _notes(found.tasks), number=True),
        Column("parameters", number=True),
        Column(against),
    )
    rows = [_row(line) for line in found.lines]
    halves = tuple(
        Table(f"{name}-{part}", title or what, (columns[0], *columns[cut]), _cut(rows, cut))
        for part, what, cut in (("gains", "Gains", slice(1, 4)), ("verdicts", "Verdicts", slice(4, 6)))
    )
    return Table(name, title or "Headline", columns, tuple(map(Row, rows)), heading=bool(title), narrow=halves)


def _cut(rows: list[tuple[str | Cell, ...]], cut: slice) -> tuple[Row, ...]:
    return tuple(Row((row[0], *row[cut])) for row in rows)


def _notes(measure: Measure | None) -> tuple[str, ...]:
    """Say what a column of gains is measured by, and on which tasks."""
    if measure is None:
        return ("not measured",)
    many = len(measure.tasks)
    known = many + measure.left_out
    over = f"mean of {many} tasks" if not measure.left_out else f"mean of {many} of {known} tasks"
    return measure.unit, over if known > 1 else measure.tasks[0] if many else "loss, without interval"


def _row(line: Line) -> tuple[str | Cell, ...]:
    size = "" if line.ratio is None or line.control is None else f" ({line.ratio:.2f} × {line.control})"
    return (
        line.method,
        rank_text(line.rank),
        gain_text(line.text),
        gain_text(line.tasks),
        f"{count(line.trainable)}{size}",
        Cell((line.verdict,), line.tone),
    )


def rank_text(rank: tuple[int, int] | None) -> str:
    """Format a rank, or the range of ranks that no difference is shown between, as ``2–4``."""
    if rank is None:
        return NOTHING
    return str(rank[0]) if rank[0] == rank[1] else f"{rank[0]}–{rank[1]}"


def gain_text(gain: Gain | None) -> str | Cell:
    """Format a gain with its interval, if it has one; it is marked where interval and corrected tests agree."""
    if gain is None:
        return NOTHING
    each = gain.change
    if not (math.isfinite(each.low) and math.isfinite(each.high)):
        return signed(gain.value, 4 if each.scale is Scale.RAW else 1)
    marked = (gain.tone == "better" and each.low > 0) or (gain.tone == "worse" and each.high < 0)
    return Cell((change_text(each, unit=False),), gain.tone if marked else "within noise")


def headline_fields(results: ComparisonResults) -> Iterator[tuple[str, int, tuple[object, ...]]]:
    """Yield each method's name, its parameters and its fields under :data:`HEADLINE_COLUMNS`, in the order of ranks."""
    found = headline(results)
    for line in found.lines:
        gains = (*_numbers(line.text, found.text), *_numbers(line.tasks, found.tasks))
        yield line.method, line.trainable, (*(line.rank or (None, None)), *gains, line.control, line.verdict)


def _numbers(gain: Gain | None, measure: Measure | None) -> tuple[object, ...]:
    if gain is None or measure is None:
        return (None,) * 4
    ends = (end if math.isfinite(end) else None for end in (gain.change.low, gain.change.high))
    return gain.value, *ends, measure.unit
