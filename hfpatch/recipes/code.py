"""What a recipe names that is code from outside the installed packages, which runs only where the user said so."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.support.plugins import is_installed, is_installed_path

REFERENCE = re.compile(r"[\w.]+:\w+")
"""How a method of one's own is named: ``package.module:Class``."""
_CONSENTS = ("trust_remote_code", "confirm_run_unsafe_code")


def refuse_code(values: dict[str, Any], said: Collection[str], source: str) -> None:
    """Refuse a recipe that names code outside the installed packages: whoever wrote it is not who runs it.

    Such are methods of one's own (``module:Class``), task files (their templates are code, too, and ``!function`` names
    more), the modelling code of a model or a tokenizer, attention kernels of the hub, and code that a model writes.

    Args:
        values: the recipe's content.
        said: keys that were given beside the file, by who runs it.
        source: the recipe's file.

    Raises:
        HfpatchError: naming each key.
    """
    below = tuple(f"{key}." for key in said)
    found = {key: value for key, value in _leaves(values) if _is_code(key, value) and not f"{key}.".startswith(below)}
    if named := [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in found.items()]:
        raise HfpatchError(
            f"{source}: names code outside the installed packages ({', '.join(named)}); read that code, then add "
            "--trust-code (in Python: trust_code=True)"
        )


def _is_code(key: str, value: object) -> bool:
    *_, last = key.split(".")
    if last in _CONSENTS:
        return bool(value)
    if not isinstance(value, str):
        return False
    if last == "type":
        return REFERENCE.fullmatch(value) is not None and not is_installed(value.partition(":")[0])
    if last == "attn_implementation":
        return "/" in value
    return last == "include_path" and not is_installed_path(Path(value))


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of all that is no mapping and no list."""
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
