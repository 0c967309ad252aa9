"""Markdown from data, in which names and sentences are never taken for markup."""

from __future__ import annotations

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
