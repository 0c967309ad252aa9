"""Code from outside the installed packages that a recipe names: it runs only with the user's consent."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.support.plugins import is_installed, is_installed_path

REFERENCE = re.compile(r"[\w.]+:\w+")
"""The name of a user's method: ``package.module:Class``."""
_CONSENTS = ("trust_remote_code", "confirm_run_unsafe_code")


def refuse_code(values: dict[str, Any], allowed: Collection[str], source: str) -> None:
    """Refuse a recipe that names code outside the installed packages, as its author may not be its user.

    Such code are a user's methods (``module:Class``), task files (their templates are code, too, and ``!function``
    names more), the modelling code of a model or a tokenizer, attention kernels of the hub, and code that a model
    writes. The user gave the keys ``allowed`` beside the file ``source``; the error names each other one.
    """
    below = tuple(f"{key}." for key in allowed)
    named = []
    for key, value in leaves(values):
        last = key.rpartition(".")[2]
        if last in _CONSENTS:
            is_code = bool(value)
        elif not isinstance(value, str):
            is_code = False
        elif last == "type":
            is_code = REFERENCE.fullmatch(value) is not None and not is_installed(value.partition(":")[0])
        elif last == "attn_implementation":
            is_code = "/" in value
        else:
            is_code = last == "include_path" and not is_installed_path(Path(value))
        if is_code and not f"{key}.".startswith(below):
            named.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    if named:
        raise HfpatchError(
            f"{source}: names code outside the installed packages ({', '.join(named)}); read that code, then add "
            "--trust-code (in Python: trust_code=True)"
        )


def leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of every scalar."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
