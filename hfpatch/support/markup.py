"""Markdown and HTML from data, in which names and sentences are never taken for markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\`*|~$]|\](?=[(\[:])|(?<!\w)_|_(?!\w))")
_LINE_START = re.compile(r"^(\d*)([#+=>.)-])")


def escape(text: str) -> str:
    """Return ``text`` on one line, with the inline markup of Markdown and HTML escaped."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", line)


def block(text: str) -> str:
    """Return ``text`` escaped for the beginning of a block: it makes no heading, list or rule."""
    return _LINE_START.sub(r"\1\\\2", escape(text))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[bool] = ()) -> str:
    """Return a Markdown table of escaped cells; columns of ``numbers`` (default: all but the first) aligned right."""
    right = numbers or [i > 0 for i in range(len(headings))]
    rule = ["---:" if is_number else "---" for is_number in right]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def html_table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]], notes: Sequence[str] = ()
) -> str:
    """Return an HTML table for ``_repr_html_`` with ``notes`` below; numbers are formatted and aligned right."""
    lines = []
    for row in rows:
        cells = []
        for value in row:
            if isinstance(value, int | float) and not isinstance(value, bool):
                number = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
                cells.append(f'<td style="text-align: right">{number}</td>')
            else:
                text = None if value is None else html.escape(str(value))
                cells.append("<td></td>" if text is None else f'<td style="text-align: left">{text}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>{below}"
    )
