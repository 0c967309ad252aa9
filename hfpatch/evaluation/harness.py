"""Changes to lm-eval while it runs here: no progress bars or log lines, each template compiled once; its command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial

from lm_eval.utils import env
from tqdm import tqdm

_MODULES = ("lm_eval.api.task", "lm_eval.api.model", "lm_eval.models.huggingface")
_LOGGERS = ("lm_eval", "datasets", "transformers.tokenization_utils_base")


@contextmanager
def quiet() -> Iterator[None]:
    """Show only errors of lm-eval and datasets inside the ``with`` block, for modules already imported."""
    import datasets

    with ExitStack() as stack:
        for module in (sys.modules[name] for name in _MODULES if name in sys.modules):
            stack.callback(vars(module).update, tqdm=module.tqdm)
            vars(module).update(tqdm=partial(tqdm, disable=True))
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Cache lm-eval's compiled templates, which it otherwise compiles again for every document."""
    env.from_string = lru_cache(maxsize=256)(env.from_string)
    try:
        yield
    finally:
        del env.from_string  # the method of the class is visible again


def run_lm_eval(arguments: Sequence[str]) -> None:
    """Run ``lm_eval ARGUMENTS`` with ``--model hfpatch`` registered.

    Only lm-eval up to 0.4.13 needs this; later versions find hfpatch by the entry point ``lm_eval.models``.

    Raises:
        SystemExit: as lm-eval ends, such as after its help or with wrong arguments.
    """
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm_eval", *arguments]  # its parser reads them there
    try:
        cli_evaluate()
    finally:
        sys.argv = before
