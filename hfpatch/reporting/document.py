"""A report as plain data: parts of sections of blocks, which ``html``, ``markdown`` and ``terminal`` render.

All text is plain: renderers escape it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hfpatch.reporting.numbers import MINUS, NOTHING

Tone = Literal["better", "worse", "mixed", "same", "undecided", "not tested"]
MARKS: dict[Tone, str] = {
    "better": "●",
    "worse": "◆",
    "mixed": "◐",
    "same": "■",
    "undecided": "○",
    "not tested": "×",
}
"""The mark of each tone as a character, so that colour alone distinguishes none."""
WORDS: dict[Tone, str] = {"same": "equivalent"}
"""Tones in words, where these are not their names."""
_NUMBERS = (NOTHING, MINUS, "+", *"0123456789")
Fact = tuple[str, str]
"""A label and its value."""


@dataclass(frozen=True)
class Text:
    """A paragraph; ``style`` says how it is set: as the ``headline`` of the document, or as a ``caption``."""

    text: str
    style: Literal["plain", "headline", "caption"] = "plain"


@dataclass(frozen=True)
class Facts:
    """Labelled lines, below a heading of their own if there is a ``title``."""

    items: tuple[Fact, ...]
    title: str = ""


@dataclass(frozen=True)
class Sentences:
    """A list of sentences, such as warnings; of ``brief`` ones a terminal shows the beginnings of the first."""

    items: tuple[str, ...]
    title: str = ""
    brief: bool = False


@dataclass(frozen=True)
class Finding:
    """One sentence: ``subject``, such as a method, and ``rest``."""

    subject: str
    rest: str
    tone: Tone

    def __str__(self) -> str:
        return f"{self.subject} {self.rest}"


@dataclass(frozen=True)
class Findings:
    """A list of findings."""

    items: tuple[Finding, ...]


@dataclass(frozen=True)
class Column:
    """A column: its name, small lines below it, whether it holds numbers, which are aligned right, and a tooltip.

    A terminal too narrow for a line a row leaves out every ``detail``.
    """

    name: str
    notes: tuple[str, ...] = ()
    number: bool = False
    tip: str = ""
    detail: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of several lines, or with a ``tone``, which marks its last line."""

    lines: tuple[str, ...]
    tone: Tone | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    cells: tuple[str | Cell, ...]
    strong: bool = False
    faint: bool = False
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # its values under the keys of filters
    href: str = ""  # the link of its first cell, escaped
    page_only: bool = False  # whether it is left out of Markdown


@dataclass(frozen=True)
class Filter:
    """A choice of rows of a table by their values under ``key``, each one of ``values``."""

    key: str
    label: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the row."""

    name: str  # its anchor
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    heading: bool = True  # whether the title is shown, or only read by screen readers
    search: bool = False
    filters: tuple[Filter, ...] = ()
    folded: bool = False  # whether a page shows it only when asked, unless it is short
    footnotes: Mapping[str, str] = field(default_factory=dict)  # the sentence of each mark that a cell may have

    @property
    def explained(self) -> str:
        """The caption, with the footnotes of the marks that some cell has."""
        text = " ".join(str(cell) for row in self.rows for cell in row.cells)
        notes = (sentence for mark, sentence in self.footnotes.items() if mark in text)
        return " ".join(filter(None, (self.caption, *notes)))

    @classmethod
    def of(
        cls, name: str, title: str, headings: Sequence[str], rows: Iterable[Sequence[str | Cell]], caption: str = ""
    ) -> Table:
        """Return a table of the columns that have values; where all cells begin like numbers, it is one of numbers."""
        cells = [tuple(row) for row in rows]
        numbers = [all(str(row[i]).startswith(_NUMBERS) for row in cells) for i in range(len(headings))]
        columns = (Column(heading, number=number) for heading, number in zip(headings, numbers, strict=True))
        return cls(name, title, tuple(columns), tuple(map(Row, cells)), caption).with_values()

    def with_values(self) -> Table:
        """Return the table without the columns that have no value in any row."""
        kept = [
            i for i, _ in enumerate(self.columns) if any(str(row.cells[i]) not in ("", NOTHING) for row in self.rows)
        ]
        return self.only(kept) if self.rows else self

    def only(self, indices: Sequence[int]) -> Table:
        """Return the table with some of its columns."""
        rows = tuple(replace(row, cells=tuple(row.cells[i] for i in indices)) for row in self.rows)
        return replace(self, columns=tuple(self.columns[i] for i in indices), rows=rows)


@dataclass(frozen=True)
class Figure:
    """A figure as an SVG document, with its words and its data as CSV."""

    name: str
    title: str
    caption: str
    svg: str
    data: str = ""


@dataclass(frozen=True)
class Download:
    """A file inside a page: its name, the text of its link, and its content."""

    name: str
    label: str
    content: str
    media_type: str = "text/csv"


@dataclass(frozen=True)
class Explorer:
    """Gains and costs of many runs, drawn and listed by the page's script from ``data``."""

    data: Mapping[str, Any]


@dataclass(frozen=True)
class Code:
    """Text that is to be copied as it is, such as BibTeX."""

    text: str
    language: str = ""


Block = Text | Facts | Sentences | Findings | Table | Figure | Download | Explorer | Code


@dataclass(frozen=True)
class Section:
    """A section: its anchor, its heading, its blocks, and its name in the navigation.

    ``folded``: a page shows its blocks only when asked.
    """

    name: str
    title: str
    blocks: tuple[Block, ...]
    label: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Part:
    """The sections of one run; ``title`` names it where there are several, ``prefix`` then begins its anchors."""

    sections: tuple[Section, ...]
    title: str = ""
    prefix: str = ""

    @property
    def figures(self) -> dict[str, Figure]:
        """The figures by the name of their files."""
        blocks = (block for section in self.sections for block in section.blocks)
        return {f"{self.prefix}{block.name}": block for block in blocks if isinstance(block, Figure)}


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    parts: tuple[Part, ...]  # one, or one for each run that is reported separately
    kind: str = "report"
    description: str = ""
    complete: bool = True  # whether every planned run is in it
    glance: tuple[Fact, ...] = ()  # the few facts shown first
    opening: tuple[Section, ...] = ()  # before the parts
    closing: tuple[Section, ...] = ()  # after the parts
    summary: tuple[Block, ...] = ()  # what a terminal shows
