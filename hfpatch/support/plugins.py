"""Entry points by which other packages extend hfpatch, and names of objects in modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, nearest


def entries(group: str) -> Iterator[EntryPoint]:
    """Yield the entry points of a group that installed packages declare, in the order of their names."""
    yield from sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def where(entry: EntryPoint) -> str:
    """Return what a message calls an entry point."""
    return f"entry point {entry.name!r} ({entry.value})"


def load(entry: EntryPoint) -> Any:
    """Return the object that an entry point names.

    Raises:
        HfpatchError: naming the entry point, if it cannot be loaded.
    """
    try:
        return entry.load()
    except Exception as error:  # whatever a third party's import raises
        raise HfpatchError(f"{where(entry)} cannot be loaded: {one_line(error)}") from error


def named_object(reference: str) -> Any:
    """Return the object that ``package.module:Name`` names; modules of the working directory are found first.

    Raises:
        HfpatchError: if there is no such module or name, or the module cannot be imported.
    """
    module_name, _, name = reference.partition(":")
    here = str(Path.cwd())
    if sys.path[:1] not in ([here], [""]):
        sys.path.insert(0, here)  # it stays: the module may import its neighbours later
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module raises
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            hint = nearest(module_name, [path.stem for path in Path().glob("*.py")])
            raise HfpatchError(
                f"{reference}: no module {module_name!r} in {here} or among the installed packages{hint}"
            ) from None
        raise HfpatchError(f"{reference}: the module cannot be imported: {one_line(error)}") from error
    if not hasattr(module, name):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise HfpatchError(f"{reference}: {module.__file__} defines no {name!r}{nearest(name, own)}")
    return getattr(module, name)


def being_imported(module: str) -> bool:
    """Return whether the import of a module has begun and has not ended."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def one_line(error: BaseException) -> str:
    """Return an error as one line that names its kind, unless it is one of hfpatch."""
    text = " ".join(str(error).split())
    return text if isinstance(error, HfpatchError) else f"{type(error).__name__}: {text}"
