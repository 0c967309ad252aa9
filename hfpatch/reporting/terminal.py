"""The summary of a document in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text as Styled

from hfpatch.reporting import document as doc

_COLOURS = {"better": "green", "worse": "red", "same": "cyan", **dict.fromkeys(("undecided", "not tested"), "dim")}
_UNBOUNDED = 1000  # columns, to measure how wide a table is
_MOST_BRIEF = 2  # so that the answer below them ends within 40 lines for ten methods


def print_document(document: doc.Document) -> None:
    """Print the document's summary."""
    console = Console()
    for index, block in enumerate(document.summary):
        match block:
            case doc.Table():
                if index:
                    console.print()
                _print_table(console, block)
            case doc.Text():
                style = {"headline": "bold", "caption": "dim"}.get(block.style, "")
                console.print(block.text, style=style, highlight=False, markup=False)
            case doc.Sentences():
                for sentence in _beginnings(block.items, console.width - 2) if block.brief else block.items:
                    console.print(f"· {sentence}", highlight=False, markup=False)
            case doc.Facts():
                for label, value in block.items:
                    console.print(f"{label}: {value}", highlight=False, markup=False, soft_wrap=True)
            case doc.Findings():
                for finding in block.items:
                    text, style = f"{doc.MARKS[finding.tone]} {finding}", _COLOURS.get(finding.tone, "")
                    console.print(text, style=style, highlight=False, markup=False)


def _beginnings(sentences: Sequence[str], width: int) -> list[str]:
    """Return the first sentences, each cut to a line, and where the others are."""
    lines = [shorten(sentence, width, placeholder=" …") for sentence in sentences]
    if len(lines) > _MOST_BRIEF:
        lines[_MOST_BRIEF:] = [f"{len(lines) - _MOST_BRIEF} more; the report has all of them in full."]
    elif any(line.endswith(" …") for line in lines):
        lines.append("The report has these in full.")
    return lines


def _print_table(console: Console, content: doc.Table) -> None:
    """Print a table with a line a row; where it is too wide for that, without details, then as narrow as it can be."""
    shown = content.only([i for i, column in enumerate(content.columns) if not column.detail])
    for part, split in ((content, False), (shown, False), (shown, True)):
        table = _table(part, split=split, width=console.width)
        if console.measure(table, options=console.options.update(width=_UNBOUNDED)).maximum <= console.width:
            break
    console.print(table)
    left_out = [column.name for column in content.columns if column not in part.columns]
    more = f"The report has also: {', '.join(left_out)}." if left_out else ""
    if caption := " ".join(filter(None, [part.explained, more])):
        console.print(caption, style="dim", highlight=False, markup=False)


def _table(content: doc.Table, *, split: bool, width: int) -> Table:
    """Return the table for rich, which breaks lines so that it fits.

    With ``split``, headings after their first word, and intervals, begin a line.
    """
    title = {"title": content.title, "title_justify": "left", "title_style": "bold"} if content.heading else {}
    padding = (0, int(not split), 0, 0)  # beside the space that the box puts between columns
    table = Table(box=SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, **title)  # type: ignore[arg-type]  # rich's types forbid a mapping of options
    room, cells = 2 * width // 3, list[list[Styled]]()
    for i, column in enumerate(content.columns):
        name, side = column.name.replace(" ", "\n", 1) if split else column.name, "right" if column.number else "left"
        head = Styled("\n".join((name, *column.notes)))  # no markup: a name may be in brackets
        cells.append([_styled(row.cells[i], split) for row in content.rows])
        longest = max(len(line) for cell in (head, *cells[-1]) for line in cell.plain.split("\n"))
        whole = (i == 0 or column.number) and longest < room  # names and numbers, as far as there is room
        room -= whole * (longest + 1)
        table.add_column(head, justify=side, overflow="fold", no_wrap=whole)  # type: ignore[arg-type]  # as literals
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table


def _styled(cell: str | doc.Cell, split: bool) -> Styled:
    """Return a cell, with the mark of its tone before its last line."""
    *lines, last = cell.lines if isinstance(cell, doc.Cell) else (cell,)
    tone = cell.tone if isinstance(cell, doc.Cell) else None
    text = "\n".join([*lines, f"{doc.MARKS[tone]} {last}" if tone else last])
    return Styled(text.replace(" [", "\n[") if split else text, _COLOURS.get(tone or "", ""))
