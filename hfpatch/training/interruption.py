"""SIGTERM, which schedulers send before they stop a machine: finish the step, save, and exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType

from hfpatch.support.signals import sigterm_answered_by

_POLL_S = 0.5
_GRACE_S = 300.0  # to finish and save a step, which may take minutes


class Terminated(SystemExit):
    """A run was asked to end; the exit code is 143, as for any program ended by SIGTERM.

    Attributes:
        step: the optimiser steps done and saved; None where workers did them, or outside of training.
    """

    def __init__(self, step: int | None) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.step = step


def leave(number: int, frame: FrameType | None) -> None:
    """Raise `Terminated` at a SIGTERM, which releases locks; the training loop has a handler of its own."""
    raise Terminated(None)


@cache
def end_with_launcher() -> None:
    """End this process by SIGTERM once its launcher, ``accelerate launch`` or ``torchrun``, is gone.

    Otherwise the processes of a killed launcher keep writing to the run's folder. Without a launcher it does nothing.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent("launcher")


def end_with_parent(name: str) -> None:
    """End this process by SIGTERM once its parent is gone, which messages call ``name``."""
    parent = os.getppid()
    end_when(lambda: os.getppid() != parent, f"{name} (process {parent})")


def end_when(gone: Callable[[], bool], name: str | None = None) -> None:
    """End this process by SIGTERM once another one, which a message calls ``name`` if given, is ``gone``."""

    def watch() -> None:
        while not gone():
            time.sleep(_POLL_S)
        if name is not None:
            print(f"hfpatch: the {name} is gone, so this process ends", file=sys.stderr, flush=True)
        if not _this_process.asked:  # by a scheduler, which asks all processes; a second SIGTERM would end the step
            os.kill(os.getpid(), signal.SIGTERM)  # the step is finished and saved, if one is running
        time.sleep(_GRACE_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@dataclass
class SigtermWatch:
    """Whether a SIGTERM has ``asked`` for the end."""

    asked: bool = False


_this_process = SigtermWatch()  # to which `end_when` looks


@contextmanager
def watch_sigterm() -> Iterator[SigtermWatch]:
    """Note the first SIGTERM instead of acting on it; a second one acts as before.

    At the end the first one acts too, if no exception was raised: it may arrive after the last look at ``asked``.
    Outside the main thread, where Python allows no handler, nothing is noted.
    """
    watch, before = SigtermWatch(), signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        watch.asked = _this_process.asked = True
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    with sigterm_answered_by(note):
        yield watch
    if watch.asked:
        signal.raise_signal(signal.SIGTERM)
