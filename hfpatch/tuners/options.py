"""The types that the options of a method may have, and whether a value fits one."""

from __future__ import annotations

import functools
import inspect
import json
import re
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
_FLOAT = re.compile(r"(?<![\w'])float(?![\w'])")  # the type, not a word of a Literal
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
    kinds = (hint, *typing.get_args(hint))
    choices = [item for kind in kinds if typing.get_origin(kind) is Literal for item in typing.get_args(kind)]
    try:
        given = sorted(value) if isinstance(value, set) else value
        if isinstance(given, dict) and not all(isinstance(key, str) for key in given):  # JSON would make text of them
            raise TypeError
        text = json.dumps(given)  # in which a tuple, a list and a set are the same
        right = _adapter(hint, str(hint)).validate_json(text)
        if right in choices and text not in map(json.dumps, choices) and type(value) not in kinds:  # True equals 1
            raise TypeError
    except (TypeError, ValueError):  # pydantic's error is one too
        kind = _FLOAT.sub("finite float", inspect.formatannotation(hint))
        raise HfpatchError(f"{name}={value!r} must be of type {kind}{nearest(str(value), map(str, choices))}") from None
    if isinstance(right, list | tuple | set):
        return type(right)(given)
    return right if isinstance(right, dict) else value  # 1 is a float too, and stays 1


@functools.cache
def _adapter(hint: Any, written: str) -> TypeAdapter[Any]:  # ``written``, as set | tuple equals tuple | set
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))
