"""Writing results.json at most every half minute while runs finish."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 30.0
"""Seconds between two writes of results.json while runs finish."""
SHARE = 0.05
"""The largest share of the time that writing may take; with very many runs it is written less often."""


class Throttled:
    """Calls a function that writes the complete runs, unless it was called a short while ago.

    This affects only readers during the run: every run has its own result, from which the next call, or the next
    command after a kill, collects everything. As a context manager it writes once more if an error ends the block.
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
        """Write if something is pending."""
        if self._pending:
            started = self._clock()
            self._write()
            ended = self._clock()
            self._pending, self._next = False, ended + max(EVERY_S, (ended - started) / SHARE)

    def __enter__(self) -> Throttled:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write once more if an error ends the block."""
        if kind is not None:
            self.flush()
