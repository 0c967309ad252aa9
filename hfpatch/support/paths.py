"""Paths as callers write them: text, or `pathlib.Path`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hfpatch.errors import HfpatchError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes_text(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function take text for each parameter that is a path, or several, by its annotation.

    Raises:
        HfpatchError: when it is called with the path of a recipe in place of the recipe.
    """
    signature = inspect.signature(function)
    paths = [name for name, parameter in signature.parameters.items() if "Path" in str(parameter.annotation)]

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        bound = signature.bind(*args, **kwargs)
        if isinstance(recipe := bound.arguments.get("recipe"), str | Path):
            raise HfpatchError(f"recipe '{recipe}': {function.__name__} takes a recipe and no path; use load_recipe")
        for name in paths:
            if name in bound.arguments:
                bound.arguments[name] = _as_path(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return call


def _as_path(value: Any) -> Any:
    if isinstance(value, str):
        return Path(value)
    return [_as_path(item) for item in value] if isinstance(value, list | tuple) else value
