"""Keeping other libraries' messages out of the output."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_KERNELS = ("bitsandbytes", "torchao")  # they log at import which kernels this machine lacks


def quiet_libraries() -> None:
    """Turn off progress bars, and advice that is meant for scripts, in this process and its children."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in (*_KERNELS, "hfpatch.tuners.model"):  # it advises on sizes, which recipes choose
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def quiet_kernels() -> Iterator[None]:
    """Suppress warnings about missing kernels during imports; log levels that were set are kept."""
    loggers = [logger for logger in map(logging.getLogger, _KERNELS) if logger.level == logging.NOTSET]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger in loggers:
            logger.setLevel(logging.NOTSET)
