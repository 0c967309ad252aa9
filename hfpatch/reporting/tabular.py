"""Tables as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV; None becomes an empty field, text that a spreadsheet takes for a formula gets a quote."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_as_text(field) for field in row] for row in rows)
    return text.getvalue()


def _as_text(field: object) -> object:
    return f"'{field}" if isinstance(field, str) and field.startswith(_FORMULA) else field
