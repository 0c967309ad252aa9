"""Handlers of SIGTERM, which launchers, schedulers and drivers of workers send."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_answered_by(handler: Callable[..., Any]) -> Iterator[None]:
    """Handle SIGTERM with ``handler``; outside the main thread, where Python allows no handler, do nothing."""
    with sigterm_kept():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        yield


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the SIGTERM handler at the end, if a library has changed it.

    Forked processes inherit it. A process with a handler in Python may miss the signal, and a pool of
    ``multiprocessing`` then waits for it forever.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:  # None: not set by Python
            signal.signal(signal.SIGTERM, before)
