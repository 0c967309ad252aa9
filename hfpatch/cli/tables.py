"""Results as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from hfpatch.evaluation import TaskResult
    from hfpatch.reporting.study.tables import TextTable
    from hfpatch.reporting.tables import Cell, Heading, MainTable

LEGEND = (
    "Mean over seeds, paired difference to the baseline (points, or % of a perplexity) with 95 % interval, verdict. "
    "* stands at 5 % after Holm's correction over methods and tasks; † found by the test alone, not after correction."
)
_NARROW = ("configuration", "validation loss", "improvement, %", "verdict")  # where a study's whole table does not fit
_COLOURS = {"better": "green", "worse": "red", "within noise": "dim", "too few documents": "dim"}


def print_report(run_dir: Path) -> None:
    """Print what the report of a run folder begins with: that of a comparison, or of a pretraining study."""
    from hfpatch.reporting.study.results import is_study

    if is_study(run_dir):
        print_study(run_dir)
    else:
        print_comparison(run_dir)


def print_study(run_dir: Path) -> None:
    """Print a study's answer, its variants, what is missing and where its report is."""
    from hfpatch.reporting.study.answer import answer_of
    from hfpatch.reporting.study.results import read_study
    from hfpatch.reporting.study.tables import main_table

    study, console = read_study(run_dir), Console()
    content = main_table(study)
    wide = _of_variants(content, [heading for heading in content.headings if heading != "query"])
    unbounded = console.options.update(width=1000)
    fits = console.measure(wide, options=unbounded).maximum <= console.width
    console.print(wide if fits else _of_variants(content, _NARROW))
    for line in (answer_of(study).headline, *(f"· {line}" for line in study.missing)):
        console.print(line, highlight=False, markup=False)
    _print_place(console, run_dir)


def _of_variants(content: TextTable, headings: Sequence[str]) -> Table:
    places = [content.headings.index(heading) for heading in headings]
    table = Table(*(Column(content.headings[i], justify="right" if i in content.numbers else "left") for i in places))
    for row in content.rows:
        table.add_row(*(Text(row.cells[i]) for i in places), style=_COLOURS.get(row.tone or "", ""))
    return table


def print_comparison(run_dir: Path) -> None:
    """Print a run folder's methods and tasks, its warnings and where its report is."""
    from hfpatch.reporting.results import read_results
    from hfpatch.reporting.tables import main_table

    results, console = read_results(run_dir), Console()
    content = main_table(results)
    wide = _by_method(content)
    unbounded = console.options.update(width=1000)
    fits = console.measure(wide, options=unbounded).maximum <= console.width
    for table in [wide] if fits else _by_task(content):
        console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    for line in (*results.warnings, *results.missing):
        console.print(f"· {line}", highlight=False, markup=False)
    _print_place(console, run_dir)


def _print_place(console: Console, run_dir: Path) -> None:
    console.print(f"report: {run_dir / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def _by_method(content: MainTable) -> Table:
    """Return one table with a row for each method and a column for each task."""
    table = Table(Column("method"), Column("trainable", justify="right"))
    for heading in content.headings:
        table.add_column(f"{heading.task}\n{_measured(heading)}\n{heading.better}")
    for row in content.rows:
        table.add_row(row.method, row.trainable, *(Text("\n").join(_lines(cell)) for cell in row.cells))
    return table


def _by_task(content: MainTable) -> Iterator[Table]:
    """Yield a table for each task with a row for each method, for terminals that one table is too wide for."""
    for index, heading in enumerate(content.headings):
        title = f"{heading.task}: {_measured(heading)}, {heading.better}"
        table = Table(Column("method"), Column("trainable", justify="right"), title=title, title_justify="left")
        for name in ("value", "difference", "verdict"):
            table.add_column(name)
        for row in content.rows:
            table.add_row(row.method, row.trainable, *_lines(row.cells[index]))
        yield table


def _measured(heading: Heading) -> str:
    return f"{heading.metric}, n = {heading.n}"


def print_scores(scores: Mapping[str, TaskResult], title: str) -> None:
    """Print every metric of every task."""
    table = Table(title=title, title_justify="left")
    for column in ("task", "metric"):
        table.add_column(column)
    for column in ("value", "± standard error", "n"):
        table.add_column(column, justify="right")
    for task, score in scores.items():
        for metric, value in score.metrics.items():
            error = score.stderr.get(metric)
            shown = _number(error) if isinstance(error, float) else ""
            table.add_row(task, metric, _number(value), shown, str(score.n))
    Console().print(table)


def _lines(cell: Cell) -> list[Text]:
    """Return the value and, where there is a comparison, the difference and the verdict."""
    if cell.verdict is None:
        return [Text(cell.value)]
    return [Text(cell.value), Text(cell.difference), Text(cell.verdict_text, style=_COLOURS[cell.verdict])]


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
