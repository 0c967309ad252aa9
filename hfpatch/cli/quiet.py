"""Keeping other libraries' messages out of the output, and an interruption to one line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from hfpatch.support.ranks import may_speak


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars, advice and warnings; hfpatch's own warnings remain."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import logging

    for name in ("bitsandbytes", "torchao"):  # say at import which of their kernels this machine lacks
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(?!hfpatch)")
    warnings.showwarning = _show


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, without the place in the code that gave it."""
    print(f"hfpatch: warning: {' '.join(str(message).split())}", file=sys.stderr)


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into one line that says how to continue."""
    from hfpatch.training.interruption import Terminated

    try:
        yield
    except KeyboardInterrupt:
        if may_speak():
            print(f"hfpatch: interrupted; {advice}", file=sys.stderr)
        raise typer.Exit(130) from None
    except Terminated as end:
        if may_speak():
            print(f"hfpatch: ended by SIGTERM after step {end.step}, which is saved; {advice}", file=sys.stderr)
        raise
