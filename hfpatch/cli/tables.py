"""Results as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hfpatch.evaluation import TaskResult
    from hfpatch.pipeline.inspection import Inspection
    from hfpatch.reporting.tables import Cell

_COLOURS = {"better": "green", "worse": "red", "within noise": "dim"}


def print_comparison(run_dir: Path) -> None:
    """Print a run folder's methods and tasks, its warnings and where its report is."""
    from hfpatch.reporting.results import read_results
    from hfpatch.reporting.tables import main_table

    results = read_results(run_dir)
    content = main_table(results)
    table = Table(title=results.name, title_justify="left")
    table.add_column("method", no_wrap=True)
    table.add_column("trainable", justify="right")
    for heading in content.headings:
        table.add_column(f"{heading.task}\n{heading.metric}, n = {heading.n}, {heading.better}")
    for row in content.rows:
        table.add_row(row.method, row.trainable, *(_cell(cell) for cell in row.cells))
    console = Console()
    console.print(table)
    for line in (*results.warnings, *results.missing):
        console.print(f"· {line}", highlight=False, markup=False)
    console.print(f"report: {run_dir / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


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
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            table.add_row(task, metric, f"{value:.4f}", shown, str(score.n))
    Console().print(table)


def print_inspection(found: Inspection) -> None:
    """Print a model's attention sites and parameter counts."""
    base = found.base
    table = Table(title=f"{base.name} · {base.model.config.model_type} · {base.sha256[:12]}", title_justify="left")
    for column in ("layer", "family", "attention", "query", "added to the residual stream by"):
        table.add_column(column, overflow="fold")
    for site in found.sites:
        table.add_row(str(site.layer), site.family, site.path, site.projections["query"].path, site.exit_path)
    console = Console()
    console.print(table)
    console.print(str(found.summary), highlight=False, markup=False)


def _cell(cell: Cell) -> Text:
    if cell.verdict is None:
        return Text(cell.value)
    return Text.assemble(f"{cell.value}\n{cell.difference}\n", (cell.verdict_text, _COLOURS[cell.verdict]))
