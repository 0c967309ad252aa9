"""SIGTERM, as launchers, schedulers and workers' drivers send it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_answered_by(handler: Callable[..., Any]) -> Iterator[None]:
    """Let ``handler`` answer SIGTERM for as long as this lasts.

    It changes nothing outside the main thread, where Python allows no handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
