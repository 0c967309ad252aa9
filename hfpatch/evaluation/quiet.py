"""Keeping lm-eval's and datasets' progress bars and log lines out of the caller's output."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

_MODULES = ("lm_eval.api.task", "lm_eval.api.model", "lm_eval.models.huggingface")
_LOGGERS = ("lm_eval", "datasets", "transformers.tokenization_utils_base")


class _NoBar(tqdm):
    """A progress bar that never shows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


@contextmanager
def quiet() -> Iterator[None]:
    """Let only errors of lm-eval and datasets through while the block runs; for what is imported by then."""
    with ExitStack() as stack:
        for module in (sys.modules[name] for name in _MODULES if name in sys.modules):
            stack.enter_context(_without_bar(module))
        for name in _LOGGERS:
            stack.enter_context(_errors_only(name))
        stack.enter_context(_without_dataset_bars())
        yield


@contextmanager
def _without_bar(module: ModuleType) -> Iterator[None]:
    shown = module.tqdm
    module.__dict__["tqdm"] = _NoBar
    try:
        yield
    finally:
        module.__dict__["tqdm"] = shown


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _without_dataset_bars() -> Iterator[None]:
    import datasets

    if not datasets.is_progress_bar_enabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
