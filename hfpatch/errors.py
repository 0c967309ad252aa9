"""The one error that a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HfpatchError(ValueError):
    """A mistake in what hfpatch was given: what is wrong, where, and how to mend it, in one line.

    The command line prints the message without a traceback and exits with code 2. Library users catch it as any
    other exception.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
