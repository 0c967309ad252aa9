"""Tables as a notebook shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]], notes: Sequence[str] = ()
) -> str:
    """Return an HTML table for ``_repr_html_``: all text is escaped, numbers are aligned right, ``notes`` are below."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
    )


def _cell(value: object) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        return f'<td style="text-align: right">{text}</td>'
    return f'<td style="text-align: left">{escape(str(value))}</td>'
