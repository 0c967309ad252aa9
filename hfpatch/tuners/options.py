"""The types that the options of a method may have, and whether a value fits one."""

from __future__ import annotations

import sys
import types
import typing
from typing import Any, Literal

from hfpatch.errors import HfpatchError, nearest

ALLOWED = (
    "int, float, bool, str, None, Literal[...], list[...], set[...] or tuple[..., ...] of these, dict[str, list[...]], "
    "or several joined by |"
)
_UNIONS = (types.UnionType, typing.Union)
_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string", types.NoneType: "None"}


def require_option_type(name: str, hint: Any) -> None:
    """Refuse an option whose values cannot be checked, or not be saved as JSON.

    Raises:
        HfpatchError: naming the option and the types that work.
    """
    for kind in typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,):
        items = typing.get_args(kind)
        match typing.get_origin(kind):
            case None:
                fine = kind in _NAMES
            case typing.Literal:
                fine = all(type(item) in _NAMES for item in items)
            case origin if origin in (list, set) or (origin is tuple and items[1:] == (...,)):
                fine = items[0] in _NAMES
            case origin if origin is dict:
                fine = (
                    items[0] is str and typing.get_origin(items[1]) is list and typing.get_args(items[1])[0] in _NAMES
                )
            case _:
                fine = False
        if not fine:
            shown = kind.__name__ if isinstance(kind, type) and not items else str(kind).replace("typing.", "")
            raise HfpatchError(f"option {name!r} is of type {shown}; use {ALLOWED}")


def fitting(name: str, value: Any, hint: Any) -> Any:
    """Return a value that fits the type of its option; a tuple, a list and a set are taken for each other.

    Raises:
        HfpatchError: if it does not fit.
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    for kind in kinds:
        container, items = typing.get_origin(kind), typing.get_args(kind)
        if container is None and _fits(value, kind):
            return value
        if container is Literal and any(type(value) is type(item) and value == item for item in items):
            return value
        if (
            container in (list, tuple, set)
            and isinstance(value, list | tuple | set)
            and all(_fits(item, items[0]) for item in value)
        ):
            return container(sorted(value) if isinstance(value, set) else value)
        if container is dict and isinstance(value, dict) and all(_fits(item, items[0]) for item in value):
            return {key: fitting(f"{name}[{key!r}]", item, items[1]) for key, item in value.items()}
    choices = [str(item) for kind in kinds if typing.get_origin(kind) is Literal for item in typing.get_args(kind)]
    meant = nearest(str(value), choices) if choices else ""
    raise HfpatchError(f"{name}={value!r} must be {' or '.join(map(_described, kinds))}{meant}")


def _described(kind: Any) -> str:
    items = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, items))}"
    if typing.get_origin(kind) is dict:
        return f"a mapping from names to {_described(items[1])}"
    return f"a list of {_NAMES[items[0]].split()[-1]}s" if items else _NAMES[kind]


def _fits(value: Any, kind: type) -> bool:
    if kind is not bool and isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)
