"""Writing results.json while runs come to their end: not after each of very many."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 30.0
"""How often results.json is written while runs come to their end."""
SHARE = 0.05
"""The share of the time that writing it may take: with very many runs it is written more rarely."""


class Paced:
    """Calls a function that writes what is complete, now or, if it was called a short while ago, not yet.

    Only who looks at the folder meanwhile depends on it: every run has its own result, from which the next call, or
    the next command after this one was killed, collects all. Within ``with`` nothing is left unwritten by an error.
    """

    def __init__(self, write: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._next = -float("inf")
        self._pending = False

    def __call__(self) -> None:
        """Write unless it is too soon."""
        self._pending = True
        if self._clock() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write what was not written yet."""
        if self._pending:
            started = self._clock()
            self._write()
            ended = self._clock()
            self._pending, self._next = False, ended + max(EVERY_S, (ended - started) / SHARE)

    def __enter__(self) -> Paced:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what was not written yet, if the runs do not come to their end."""
        if kind is not None:
            self.flush()
