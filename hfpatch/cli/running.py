"""Shared by the commands: quiet libraries, the printed report, and one line when a command is interrupted."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import typer

from hfpatch.support import quiet
from hfpatch.support.lazy import collection_paused, freeze
from hfpatch.support.ranks import prints_errors, runs_alone
from hfpatch.support.signals import sigterm_answered_by

RESUME = "the same command with --resume continues in {}"


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars, advice and warnings; hfpatch's own are lines, equal ones printed once."""
    quiet.quiet_libraries()
    warnings.filterwarnings("ignore", module=r"(?!hfpatch)")

    shown = set[str]()  # Python's own record is lost whenever a library changes the filters

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        line = f"hfpatch: warning: {' '.join(str(message).split())}"
        if line not in shown:
            shown.add(line)
            print(line, file=sys.stderr)

    warnings.showwarning = show


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Import libraries quietly, and without collecting the garbage among what they keep, now or later."""
    quiet_libraries()
    with collection_paused():
        yield
    freeze()


def print_report(folder: Path) -> None:
    """Print the summary of a report and where it is."""
    from hfpatch.reporting.report import document_of
    from hfpatch.reporting.terminal import print_document

    print_document(document_of(folder))
    print(f"report: {folder / 'report.html'}")


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into one line that says how to continue.

    Under a launcher SIGTERM acts as before outside of training: a process that waits for others cannot handle it.
    """
    from hfpatch.training.interruption import Terminated, leave

    try:
        with sigterm_answered_by(leave) if runs_alone() else nullcontext():
            yield
    except KeyboardInterrupt:
        if prints_errors():
            print(f"hfpatch: interrupted; {advice}", file=sys.stderr)
        raise typer.Exit(130) from None
    except Terminated as end:
        saved = "" if end.step is None else f" after step {end.step}, which is saved"
        if prints_errors():
            print(f"hfpatch: ended by SIGTERM{saved}; {advice}", file=sys.stderr)
        raise
