"""An inspection in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hfpatch.runs.inspection_tables import TextTable, inspection_tables, opening

if TYPE_CHECKING:
    from hfpatch.runs.inspection import Inspection


def print_inspection(found: Inspection) -> None:
    """Print what was looked at, a table for each analysis and what is not shown."""
    console = Console()
    for line in opening(found):
        console.print(line, highlight=False, markup=False, style="bold")
    for content in inspection_tables(found):
        console.print()
        console.print(_table(content))
        console.print(content.caption, style="dim", highlight=False, markup=False)
    summary = found.summary
    counts = f"parameters: {summary.base:,} of the base, {summary.added:,} added, {summary.trainable:,} trainable"
    console.print(f"\n{counts}", highlight=False, markup=False)
    for line in found.notes:
        console.print(f"· {line}", highlight=False, markup=False)


def _table(content: TextTable) -> Table:
    columns = [
        Column(content.headings[0], no_wrap=True),
        *(Column(name, overflow="fold") for name in content.headings[1:]),
    ]
    table = Table(*columns, title=content.title, title_justify="left", title_style="bold")
    for cells in content.rows:
        table.add_row(*map(Text, cells))
    return table
