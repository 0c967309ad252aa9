"""Learning against forgetting: the gain of each method on new text, and its changes on text to keep."""

from __future__ import annotations

from hfpatch.recipes.retention import text_of
from hfpatch.reporting.document import Cell, Column, Row, Table
from hfpatch.reporting.numbers import (
    NOTHING,
    Change,
    Scale,
    change_text,
    count,
    outcome_of,
    share_text,
)
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.parts import Comparison
from hfpatch.results.retention import AGREEMENT, RETENTION, Retention


def answers_table(results: ComparisonResults) -> Table:
    """Build the table of how many right answers each method keeps, and how many of the others it wins."""
    keep = results.retention.tasks if results.retention is not None else list(results.tasks)
    shown = [pair for pair in results.kept or () if pair.task in keep]
    tasks = {pair.task: f"right {count(pair.right)}, wrong {count(pair.wrong)}" for pair in shown}
    cells: dict[str, dict[str, Cell]] = {}  # by method and task
    for pair in shown:
        kept = share_text(pair.kept, pair.kept_low, pair.kept_high)
        cells.setdefault(pair.method, {})[pair.task] = Cell((kept, share_text(pair.won, pair.won_low, pair.won_high)))
    rows = [Row((method, *(of_method.get(task, NOTHING) for task in tasks))) for method, of_method in cells.items()]
    columns = Column("method"), *(Column(task, (counts,), number=True) for task, counts in tasks.items())
    caption = (
        "The share of the base's right answers that a method keeps; below, of its wrong ones that it wins. Each share "
        "is described alone, and shares are not compared: plain 95 % intervals over seeds and documents, with one "
        "document right and one wrong added; none where documents come in groups."
    )
    return Table("answers", "Right answers kept and won", columns, tuple(rows), caption, folded=True)


def retention_table(results: ComparisonResults) -> Table:
    """Build the table of gain and forgetting of every method at every scale of its patch."""
    rows, retention = [], results.retention or Retention()
    for point in retention.points:
        chosen = retention.chosen(point.method) == point.scale
        for task in retention.texts:
            changes = {metric: point.comparison(task, metric) for metric in RETENTION}
            if not any(changes.values()):
                continue
            verdict = results.verdict(point.method, task, results.baseline) if point.scale == 1 else None
            cells = (
                point.method,
                f"{point.scale:g}{' (chosen)' if chosen else ''}",
                text_of(task),
                _cell(results.gain_at(point), -1.0),
                *(_cell(changes[metric], 100.0 if metric == AGREEMENT else 1.0) for metric in RETENTION),
                NOTHING if verdict is None else Cell((str(outcome_of(verdict)),), verdict.tone),
            )
            others = point.scale != 1 and not chosen
            rows.append(Row(cells, faint=others, page_only=others))
    caption = (
        "Method minus base on the same tokens, with plain 95 % intervals. Verdicts are corrected over the question."
    )
    if any(point.scale != 1 for point in retention.points):
        caption += " The other scales of a patch are not trained and have no verdict."
    return Table(
        name="scales",
        title="Learning and forgetting",
        columns=(
            Column("method"),
            Column("scale", ("of its patch",), number=True),
            Column("text"),
            Column("gain", ("held-out text", "nats per token"), number=True),
            Column("bits per byte", ("lower is better",), number=True),
            Column("KL", ("nats per token",), number=True, tip="KL(base ‖ method), mean over tokens."),
            Column("top-1 agreement", ("points",), number=True, tip="Of the share of tokens, 100 % in the base."),
            Column("forgetting", ("nats per token",), number=True, tip="Rise of the mean loss, as PEFT records it."),
            Column("verdict", ("bits per byte",)),
        ),
        rows=tuple(rows),
        caption=caption,
        heading=False,
    )


def _cell(one: Comparison | None, factor: float) -> str:
    if one is None:
        return NOTHING
    low, high = sorted((factor * one.low, factor * one.high))
    return change_text(Change(factor * one.difference, low, high, Scale.RAW))
