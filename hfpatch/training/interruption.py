"""SIGTERM, as schedulers send it before they take a machine away: finish the step, save, and leave."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from types import FrameType, TracebackType
from typing import Any

_POLL_S = 1.0
_GRACE_S = 300.0


class Terminated(SystemExit):
    """A run was asked to end; the exit code is 143, as for any program ended by SIGTERM.

    Attributes:
        step: the optimiser steps done and saved; None where workers did them, or nothing was trained just then.
    """

    def __init__(self, step: int | None) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.step = step


def leave(number: int, frame: FrameType | None) -> None:
    """Answer SIGTERM by `Terminated`, so that locks are released on the way out; a training answers by itself."""
    raise Terminated(None)


@cache
def end_with_launcher() -> None:
    """End this process by SIGTERM once the launcher that started it is gone, which nothing else does.

    Without this, the processes that a killed ``accelerate launch`` or ``torchrun`` leaves keep writing to the run's
    folder. It does nothing where no such launcher is at work.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent("launcher")


def end_with_parent(name: str) -> None:
    """End this process by SIGTERM once the one that started it is gone; ``name`` is what messages call that."""
    parent = os.getppid()
    end_when(lambda: os.getppid() != parent, f"{name} (process {parent})")


def end_when(gone: Callable[[], bool], name: str) -> None:
    """End this process by SIGTERM once another one is ``gone``; ``name`` is what messages call that."""

    def watch() -> None:
        while not gone():
            time.sleep(_POLL_S)
        print(f"hfpatch: the {name} is gone, so this process ends", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # the step is finished and saved, if one is running
        time.sleep(_GRACE_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class SigtermWatch:
    """Notes the first SIGTERM for as long as it is entered; the second one acts as it did before.

    So does the first one, at the end, if no exception has come of it: it may arrive after the last look at ``asked``.
    Outside the main thread, where Python allows no handler, nothing is noted.
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
        if self.asked and kind is None:
            signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
