"""The summary of a document in a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text as Styled

from hfpatch.reporting import document as doc

_COLOURS = {"better": "green", "worse": "red", "same": "cyan", **dict.fromkeys(("undecided", "not tested"), "dim")}


def print_document(document: doc.Document) -> None:
    """Print the document's summary; a table that the terminal is too narrow for as its narrow ones."""
    console = Console()
    for index, block in enumerate(document.summary):
        match block:
            case doc.Table():
                if index:
                    console.print()
                wide = _table(block, console.width)
                fits = console.measure(wide, options=console.options.update(width=1000)).maximum <= console.width
                for each in [block] if fits or not block.narrow else block.narrow:
                    console.print(_table(each, console.width))
                if block.caption:
                    console.print(block.caption, style="dim", highlight=False, markup=False)
            case doc.Text():
                style = {"headline": "bold", "caption": "dim"}.get(block.style, "")
                console.print(block.text, style=style, highlight=False, markup=False)
            case doc.Sentences():
                for sentence in block.items:
                    console.print(f"· {sentence}", highlight=False, markup=False)
            case doc.Facts():
                for label, value in block.items:
                    console.print(f"{label}: {value}", highlight=False, markup=False, soft_wrap=True)
            case doc.Findings():
                for finding in block.items:
                    said, style = f"{doc.MARKS[finding.tone]} {finding}", _COLOURS.get(finding.tone, "")
                    console.print(said, style=style, highlight=False, markup=False)


def _table(content: doc.Table, width: int) -> Table:
    """Return a table; names stay on one line up to a third of the terminal, longer ones are broken and never cut."""
    longest = max((len(str(row.cells[0])) for row in content.rows), default=0)
    columns = (
        Column("\n".join((each.name, *each.notes)), justify="right" if each.number else "left", overflow="fold",
               no_wrap=i == 0 and longest <= width // 3)
        for i, each in enumerate(content.columns)
    )  # fmt: skip
    title = {"title": content.title, "title_justify": "left", "title_style": "bold"} if content.heading else {}
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, **title)  # type: ignore[arg-type]  # rich's types forbid a mapping of options
    for row in content.rows:
        cells = []
        for cell in row.cells:
            *first, last = cell.lines if isinstance(cell, doc.Cell) else (cell,)
            tone = cell.tone if isinstance(cell, doc.Cell) else None
            marked = f"{doc.MARKS[tone]} {last}" if tone is not None else last
            cells.append(Styled("\n").join([*map(Styled, first), Styled(marked, style=_COLOURS.get(tone or "", ""))]))
        table.add_row(*cells)
    return table
