"""Tables as CSV, and as LaTeX for a paper with the rules of the package booktabs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from hfpatch.reporting.document import Cell, Table
from hfpatch.results.tables import Record

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "−": "$-$", "×": r"$\times$", "∞": r"$\infty$", "–": "--",
    "†": r"\dag{}", "‡": r"\ddag{}", "…": r"\dots{}", "±": r"$\pm$", "[": "{[}", "]": "{]}", "*": "{*}",
}  # fmt: skip
"""``[`` and ``*`` after a line's end would be its argument; reports write ``−``, ``×`` and other signs."""


def csv_text(records: Iterable[Record], headings: Sequence[str] = ()) -> str:
    """Return records as CSV, a column for each heading, by default for each key but those of lists.

    None becomes an empty field, text that a spreadsheet takes for a formula gets a quote. Numbers have ten digits: the
    further ones of a solver differ between processors.
    """
    rows = list(records)
    keys = (key for row in rows for key, value in row.items() if not isinstance(value, list))
    headings = headings or list(dict.fromkeys(keys))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_field(row.get(heading)) for heading in headings] for row in rows)
    return text.getvalue()


def _field(cell: object) -> object:
    if isinstance(cell, str) and cell.startswith(_FORMULA):
        return f"'{cell}"
    return f"{cell:.10g}" if isinstance(cell, float) else cell


def latex(table: Table, *, caption: str = "") -> str:
    """Return a table as a ``tabular``, or with a caption as a ``table`` that floats and is labelled ``tab:`` and name.

    Lines of a heading become lines of the head, lines of a cell are joined.
    """
    alignment = "".join("r" if column.number else "l" for column in table.columns)
    heads = [(column.name, *column.notes) for column in table.columns]
    depth = max(len(head) for head in heads)
    head = [[head_lines[line] if line < len(head_lines) else "" for head_lines in heads] for line in range(depth)]
    body = [[" ".join(cell.lines if isinstance(cell, Cell) else (cell,)) for cell in row.cells] for row in table.rows]
    set_lines = [" & ".join(map(escape, cells)) + r" \\" for cells in (*head, *body)]
    set_above = [rf"\caption{{{escape(caption)}}}", rf"\label{{tab:{table.name}}}"]
    lines = [
        *([r"\begin{table}", r"\centering", *set_above] if caption else []),
        *(rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", *set_lines[:depth], r"\midrule", *set_lines[depth:]),
        *(r"\bottomrule", r"\end{tabular}"),
        *([r"\end{table}"] if caption else []),
    ]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return ``text`` on one line, with nothing left in it that LaTeX would act on."""
    return "".join(_SPECIAL.get(char, char) for char in " ".join(text.split()))
