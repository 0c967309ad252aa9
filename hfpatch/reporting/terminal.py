"""The summary of a document in a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import TextWrapper, shorten

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text as Styled

from hfpatch.reporting import document as doc

_COLOURS = {"better": "green", "worse": "red", "same": "cyan", **dict.fromkeys(("undecided", "not tested"), "dim")}
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
    """Print a table with a line a row, as far as columns with a rank can be left out for that; they are named below.

    Columns that do not fit beside the others with every word whole follow below them.
    """
    left_out: list[str] = []
    while _total(_widths(content)) > console.width and (rank := max(column.rank for column in content.columns)):
        left_out += [column.name for column in content.columns if column.rank == rank]
        content = content.only([i for i, column in enumerate(content.columns) if column.rank != rank])
    first, *rest = range(len(content.columns))
    while True:
        part = content.only([first, *rest])
        while len(part.columns) > 2 and _total(_widths(part, console.width)) > console.width:
            part = part.only(range(len(part.columns) - 1))
        console.print(_table(part, console.width))
        rest = rest[len(part.columns) - 1 :]
        if not rest:
            break
    caption = [content.caption] if content.caption else []
    cells = [cell for row in content.rows for cell in row.cells if isinstance(cell, doc.Cell)]
    words = {tone: doc.WORDS.get(tone, tone) for tone in doc.MARKS}
    unsaid = {cell.tone for cell in cells if cell.tone and words[cell.tone] not in str(cell)}
    if unsaid:
        caption.append(f"{', '.join(f'{doc.MARKS[tone]} {words[tone]}' for tone in words if tone in unsaid)}.")
    caption += content.notes(content.footnotes)
    caption += [f"The report has the columns that do not fit: {', '.join(left_out)}."] if left_out else []
    if caption:
        console.print(" ".join(caption), style="dim", highlight=False, markup=False)


def _lines(content: doc.Table, index: int) -> list[list[str]]:
    """Return the heading of a column and its cells as lines, with the marks of their tones."""
    cells = [[content.columns[index].name, *content.columns[index].notes]]
    for cell in (row.cells[index] for row in content.rows):
        *lines, last = cell.lines if isinstance(cell, doc.Cell) else (cell,)
        mark = doc.MARKS[cell.tone] + "\N{NO-BREAK SPACE}" if isinstance(cell, doc.Cell) and cell.tone else ""
        cells.append([*lines, mark + last])
    return cells


def _widths(content: doc.Table, width: int | None = None) -> list[int]:
    """Return the width of each column: the one that its longest line needs, or narrowed so that all fit in ``width``.

    The widest column is narrowed first, and no column below its longest word. Only a name in the first column that is
    longer than a third of ``width`` is broken, and any other word that is longer than half of it.
    """
    widths, words = list[int](), list[int]()
    for index in range(len(content.columns)):
        heading, *cells = _lines(content, index)
        lines = [line for cell in cells for line in cell]
        longest_of_heading = max(len(word) for line in heading for word in line.split(" "))
        widths.append(max([longest_of_heading, *map(len, lines)]))
        words.append(max([longest_of_heading, *(len(word) for line in lines for word in line.split(" "))]))
    if width is not None:
        least = [min(words[0], width // 3), *(min(word, width // 2) for word in words[1:])]
        while _total(widths) > width and (wide := [i for i in range(len(widths)) if widths[i] > least[i]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    """Return the width of columns with a space between them."""
    return sum(widths) + len(widths) - 1


class _Names(TextWrapper):
    """Breaks text at spaces and after underscores."""

    wordsep_simple_re = re.compile(r"( +)|(?<=_)")


def _wrapped(lines: Sequence[str], width: int) -> str:
    """Break lines at spaces, and those with a word that is longer than ``width`` after underscores, or anywhere."""
    parts = []
    for line in lines:
        fits = max(map(len, line.split(" "))) <= width
        parts += (TextWrapper if fits else _Names)(width, break_on_hyphens=False).wrap(line) or [""]
    return "\n".join(parts)


def _table(content: doc.Table, width: int) -> Table:
    """Return the table with its lines broken to fit."""
    widths, columns, cells = _widths(content, width), list[Column](), list[list[Styled]]()
    for index, (column, of_column) in enumerate(zip(content.columns, widths, strict=True)):
        heading, *body = (_wrapped(cell, of_column) for cell in _lines(content, index))
        columns.append(Column(heading, justify="right" if column.number else "left", width=of_column, overflow="fold"))
        tones = (str(getattr(row.cells[index], "tone", "")) for row in content.rows)
        cells.append([Styled(text, _COLOURS.get(tone, "")) for text, tone in zip(body, tones, strict=True)])
    title = {"title": content.title, "title_justify": "left", "title_style": "bold"} if content.heading else {}
    # beside the space that the box puts between columns another one, where there is room
    padding = (0, int(_total(widths) + len(widths) - 1 <= width), 0, 0)
    table = Table(*columns, box=SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, **title)  # type: ignore[arg-type]  # rich's types forbid a mapping of options
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table
