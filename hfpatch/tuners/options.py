"""The types that the options of a method may have, and whether a value fits one."""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from hfpatch.errors import HfpatchError, nearest

ALLOWED = (
    "int, float, bool, str, None, Literal[...], list[...], set[...] or tuple[..., ...] of these, dict[str, list[...]], "
    "or several joined by |"
)
_UNIONS = (types.UnionType, typing.Union)
_PLAIN = (int, float, bool, str, types.NoneType)


def require_option_type(name: str, hint: Any) -> None:
    """Refuse an option whose values cannot be checked, or not be saved as JSON.

    Raises:
        HfpatchError: naming the option and the types that work.
    """
    for kind in typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,):
        items = typing.get_args(kind)
        match typing.get_origin(kind):
            case None:
                fine = kind in _PLAIN
            case typing.Literal:
                fine = all(type(item) in _PLAIN for item in items)
            case origin if origin in (list, set) or (origin is tuple and items[1:] == (...,)):
                fine = items[0] in _PLAIN
            case origin if origin is dict:
                of = items[1]
                fine = items[0] is str and typing.get_origin(of) is list and typing.get_args(of)[0] in _PLAIN
            case _:
                fine = False
        if not fine:
            raise HfpatchError(f"option {name!r} is of type {inspect.formatannotation(kind)}; use {ALLOWED}")


def fitting(name: str, value: Any, hint: Any) -> Any:
    """Return a value that fits the type of its option; a tuple, a list and a set are taken for each other.

    Raises:
        HfpatchError: if it does not fit.
    """
    try:
        given = sorted(value) if isinstance(value, set) else value
        right = _adapter(hint).validate_json(json.dumps(given))  # a tuple, a list and a set are the same in JSON
    except (TypeError, ValueError):  # pydantic's error is one too
        kinds = (hint, *typing.get_args(hint))
        choices = [str(item) for kind in kinds if typing.get_origin(kind) is Literal for item in typing.get_args(kind)]
        kind = inspect.formatannotation(hint).replace("float", "finite float")
        raise HfpatchError(f"{name}={value!r} must be of type {kind}{nearest(str(value), choices)}") from None
    if isinstance(right, list | tuple | set):
        return type(right)(given)
    return right if isinstance(right, dict) else value  # 1 is a float too, and stays 1


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))
