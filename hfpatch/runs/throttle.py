"""Writing results.json at most every half minute while runs finish."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 30.0
"""Seconds between two writes of results.json while runs finish."""
SHARE = 0.05
"""The largest share of the time that writing may take; with very many runs it is written less often."""


class Throttled:
    """Calls a function that writes the complete runs, unless one was called a short while ago.

    This affects only readers during the run: every run has its own result, from which the next call, or the next
    command after a kill, collects everything. As a context manager it writes once more if an error ends the block.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = -float("inf")
        self._pending: Callable[[], object] | None = None

    def __call__(self, write: Callable[[], object]) -> None:
        """Write unless it is too soon."""
        self._pending = write
        if self._clock() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write if something is pending."""
        if self._pending is not None:
            started = self._clock()
            self._pending()
            ended = self._clock()
            self._pending, self._next = None, ended + max(EVERY_S, (ended - started) / SHARE)

    def __enter__(self) -> Throttled:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write once more if an error ends the block."""
        if kind is not None:
            self.flush()
        self._pending = None
