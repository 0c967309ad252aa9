"""Changes to lm-eval while it runs here: no progress bars, no log lines, and each template compiled once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

from lm_eval.utils import env
from tqdm import tqdm  # type: ignore[import-untyped]

_MODULES = ("lm_eval.api.task", "lm_eval.api.model", "lm_eval.models.huggingface")
_LOGGERS = ("lm_eval", "datasets", "transformers.tokenization_utils_base")


@contextmanager
def quiet() -> Iterator[None]:
    """Let only errors of lm-eval and datasets through inside the ``with`` block; only for modules already imported."""
    import datasets

    with ExitStack() as stack:
        for module in (sys.modules[name] for name in _MODULES if name in sys.modules):
            stack.callback(vars(module).update, tqdm=module.tqdm)
            vars(module).update(tqdm=_hidden_bar)
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield


def _hidden_bar(*args: Any, **options: Any) -> Any:
    return tqdm(*args, **{**options, "disable": True})


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Let lm-eval cache its compiled templates; by itself it compiles a template again for every document."""
    env.from_string = lru_cache(maxsize=256)(env.from_string)
    try:
        yield
    finally:
        del env.from_string  # the method of the class is visible again
