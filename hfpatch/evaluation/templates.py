"""Compiling each of a task's templates once; lm-eval compiles a template again for every document."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from lm_eval.utils import env


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Let lm-eval keep its compiled templates while the block runs; what they render is the same."""
    env.from_string = lru_cache(maxsize=256)(env.from_string)
    try:
        yield
    finally:
        del env.from_string  # the method of the class shows again
