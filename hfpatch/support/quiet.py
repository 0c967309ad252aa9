"""Keeping other libraries' messages out of the output."""

from __future__ import annotations

import logging
import os


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and advice, in this process and in those that it starts."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("bitsandbytes", "torchao"):  # say at import which of their kernels this machine lacks
        logging.getLogger(name).setLevel(logging.ERROR)
