"""The one error that a user can fix, and the words of its messages."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Sequence
from typing import Any

_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


class HfpatchError(ValueError):
    """A mistake in what hfpatch was given: what is wrong, where, and how to fix it, in one line.

    The command line prints the message without a traceback and exits with code 2. Library users catch it as any
    other exception.
    """


def whole_number(name: str, value: Any, *, at_least: int) -> int:
    """Return a value as Python's ``int``, also where it is numpy's or a float without a fraction.

    Raises:
        HfpatchError: if it is none, or below ``at_least`` or above 2^63 - 1.
    """
    finite = isinstance(value, numbers.Real) and math.isfinite(value)
    number = int(value) if finite else None
    if number is None or number != value or not at_least <= number < 2**63:
        raise HfpatchError(f"{name}={value!r} must be a whole number of at least {at_least}")
    return number


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is too small; torch has no class for the memory of CPUs."""
    return isinstance(error, MemoryError) or _MEMORY.search(str(error)) is not None


def first_line(error: BaseException, *, kind: bool = False) -> str:
    """Return the first line of what an error of another library says; with ``kind`` its class comes before.

    An error that says nothing is its class.
    """
    name, lines = type(error).__name__, str(error).strip().splitlines()
    return name if not lines else f"{name}: {lines[0]}" if kind else lines[0]


def one_line(error: BaseException) -> str:
    """Return all that an error says in one line, after its class unless it is hfpatch's own."""
    text = " ".join(str(error).split())
    return text if isinstance(error, HfpatchError) else f"{type(error).__name__}{': ' if text else ''}{text}"


def listed(words: Sequence[str]) -> str:
    """Return ``a, b and c``; of no words an empty text."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `` (did you mean 'x'?)`` for the one of ``names`` closest to ``name``, or an empty string."""
    import difflib

    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
