"""SIGTERM, as schedulers send it before they take a machine away: finish the step, save, and leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Terminated(SystemExit):
    """A run was asked to end and has saved a checkpoint; the exit code is 143, as for any program ended by SIGTERM.

    Attributes:
        step: the optimiser steps done and saved.
    """

    def __init__(self, step: int) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.step = step


class SigtermWatch:
    """Notes the first SIGTERM for as long as it is entered; the second one acts as it did before.

    Outside the main thread, where Python allows no handler, it notes nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> SigtermWatch:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
