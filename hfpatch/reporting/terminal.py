"""The summary of a document in a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import fill, shorten

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text as Styled

from hfpatch.reporting import document as doc

_COLOURS = {"better": "green", "worse": "red", "same": "cyan", **dict.fromkeys(("undecided", "not tested"), "dim")}
_UNBOUNDED = 1000  # columns, to measure how wide a table is
_WORD = re.compile(r"\[[^\]\n]*\]\S*|\S+|$")  # an interval is one word
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
                _print_text(console, block.text, style)
            case doc.Sentences():
                for sentence in _beginnings(block.items, console.width - 2) if block.brief else block.items:
                    _print_text(console, f"· {sentence}")
            case doc.Facts():
                for label, value in block.items:
                    console.print(f"{label}: {value}", highlight=False, markup=False, soft_wrap=True)
            case doc.Findings():
                for finding in block.items:
                    _print_text(console, f"{doc.MARKS[finding.tone]} {finding}", _COLOURS.get(finding.tone, ""))


def _print_text(console: Console, text: str, style: str = "") -> None:
    """Print a text in lines that break at spaces alone; rich's break at no-break spaces, too."""
    lines = fill(text, console.width, break_on_hyphens=False)
    console.print(lines, style=style, highlight=False, markup=False)


def _beginnings(sentences: Sequence[str], width: int) -> list[str]:
    """Return the first sentences, each cut to a line, and where the others are."""
    lines = [shorten(sentence, width, placeholder=" …") for sentence in sentences]
    if len(lines) > _MOST_BRIEF:
        lines[_MOST_BRIEF:] = [f"{len(lines) - _MOST_BRIEF} more; the report has all of them in full."]
    elif any(line.endswith(" …") for line in lines):
        lines.append("The report has these in full.")
    return lines


def _print_table(console: Console, content: doc.Table) -> None:
    """Print a table with a line a row; where it is too wide for that, without details, then in parts that fit."""
    shown = content.only([i for i, column in enumerate(content.columns) if not column.detail])
    for part in (content, shown):
        tables = [_table(part)]
        if console.measure(tables[0], options=console.options.update(width=_UNBOUNDED)).maximum <= console.width:
            break
    else:
        tables = _narrow_tables(shown, console.width)
    for index, table in enumerate(tables):
        if index:
            console.print()
        console.print(table)
    left_out = [column.name for column in content.columns if column not in part.columns]
    more = f"The report has also: {', '.join(left_out)}." if left_out else ""
    if caption := " ".join(filter(None, [part.explained, more])):
        _print_text(console, caption, "dim")


def _narrow_tables(content: doc.Table, width: int) -> list[Table]:
    """Return tables of the columns that name a row and as many others as have room if lines break between words.

    The first column names a row, with those after it that tell rows apart. Only what has no room breaks elsewhere.
    """
    texts = [[cell.plain for cell in cells] for cells in _cells(content, split=True)]
    least = [max(map(len, _WORD.findall("\n".join(cells)))) for cells in texts]
    longest = [max(map(len, "\n".join(cells).split("\n"))) for cells in texts]
    heads = (i for i in range(1, len(texts)) if len({row.cells[:i] for row in content.rows}) == len(content.rows))
    head = next(heads, 1)
    if sum(least[:head]) + head > 2 * width // 3:
        head, least[0] = 1, min(least[0], 2 * width // 3)
    least[head:] = [min(length, width - sum(least[:head]) - head) for length in least[head:]]
    parts = [[*range(head)]]
    for i in range(head, len(texts)):
        if sum(least[j] + 1 for j in (*parts[-1], i)) > width + 1:  # with a space between columns
            parts.append([*range(head)])
        parts[-1].append(i)
    tables = []
    for part in parts:
        widths = {i: least[i] for i in part}
        for _ in range(width + 1 - sum(least[i] + 1 for i in part)):  # the narrowest column grows first
            if growing := [i for i in part if widths[i] < longest[i]]:
                widths[min(growing, key=lambda i: widths[i])] += 1
        tables.append(_table(content.only(part), list(widths.values())))
    return tables


def _table(content: doc.Table, widths: Sequence[int] = ()) -> Table:
    """Return the table for rich: with a line a row, or with columns of these widths."""
    title = {"title": content.title, "title_justify": "left", "title_style": "bold"} if content.heading else {}
    padding = (0, int(not widths), 0, 0)  # beside the space that the box puts between columns
    table = Table(box=SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, **title)  # type: ignore[arg-type]  # rich's types forbid a mapping of options
    columns = _cells(content, split=bool(widths))
    for i, column in enumerate(content.columns):
        side = "right" if column.number else "left"
        table.add_column(columns[i][0], justify=side, overflow="fold", width=widths[i] if widths else None)  # type: ignore[arg-type]  # as a literal
    for row in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*row)
    return table


def _cells(content: doc.Table, *, split: bool) -> list[list[Styled]]:
    """Return the heading and the cells of each column.

    With ``split``, headings after their first word, and intervals, begin a line.
    """
    columns = []
    for i, column in enumerate(content.columns):
        name = column.name.replace(" ", "\n", 1) if split else column.name
        head = Styled("\n".join((name, *column.notes)))  # no markup: a name may be in brackets
        columns.append([head, *(_styled(row.cells[i], split) for row in content.rows)])
    return columns


def _styled(cell: str | doc.Cell, split: bool) -> Styled:
    """Return a cell, with the mark of its tone before its last line."""
    *lines, last = cell.lines if isinstance(cell, doc.Cell) else (cell,)
    tone = cell.tone if isinstance(cell, doc.Cell) else None
    text = "\n".join([*lines, f"{doc.MARKS[tone]} {last}" if tone else last])
    return Styled(text.replace(" [", "\n[") if split else text, _COLOURS.get(tone or "", ""))
