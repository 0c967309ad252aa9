"""Markdown from data: nothing that a name or a sentence holds is taken for markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\`*|~$]|\](?=[(\[:])|(?<!\w)_|_(?!\w))")
_LINE_START = re.compile(r"^(\d*)([#+=>.)-])")


def escape(text: str) -> str:
    """Return ``text`` on one line, with nothing left in it that Markdown or HTML would act on within a line."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", line)


def block(text: str) -> str:
    """Return ``text`` escaped to begin a block: no heading, list or rule comes of it."""
    return _LINE_START.sub(r"\1\\\2", escape(text))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[bool] = ()) -> str:
    """Return a Markdown table of escaped cells; those of ``numbers`` aligned right, by default all but the first."""
    right = numbers or [i > 0 for i in range(len(headings))]
    rule = ["---:" if each else "---" for each in right]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))
