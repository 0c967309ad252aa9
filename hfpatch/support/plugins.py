"""Entry points by which other packages extend hfpatch, and names of objects in modules."""

from __future__ import annotations

import importlib
import importlib.util
import json
import site
import sys
import sysconfig
from functools import cache
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from hfpatch.errors import HfpatchError, nearest, one_line


def where(entry: EntryPoint) -> str:
    """Return an entry point's description in messages."""
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
    module = named_module(module_name, reference)
    if not hasattr(module, name):
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise HfpatchError(f"{reference}: {module.__file__} defines no {name!r}{nearest(name, defined)}")
    return getattr(module, name)


def named_module(module_name: str, where: str) -> ModuleType:
    """Import a module by its name; modules of the working directory are found first.

    Raises:
        HfpatchError: if there is no such module, or it cannot be imported; the message begins with ``where``.
    """
    folder = str(Path.cwd())
    if not is_installed(module_name) and sys.path[:1] not in ([folder], [""]):
        sys.path.insert(0, folder)  # it stays: the module may import its neighbours later
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever the module raises
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            hint = nearest(module_name, [path.stem for path in Path().glob("*.py")])
            raise HfpatchError(
                f"{where}: no module {module_name!r} in {folder} or among the installed packages{hint}"
            ) from None
        raise HfpatchError(f"{where}: the module cannot be imported: {one_line(error)}") from error


def is_installed(module: str) -> bool:
    """Return whether a module would come from an installed package, without importing it.

    Modules of the working directory take precedence. A module that does not exist counts as installed, because no code
    of it can run.
    """
    importlib.invalidate_caches()
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])  # to look deeper would import the package
        if spec is None or spec.origin in ("built-in", "frozen"):
            return True
        paths = [spec.origin] if spec.has_location and spec.origin else []
        paths += spec.submodule_search_locations or []  # of a package without a file everything on the path
    except ValueError:  # a module that is loaded and does not say from where
        return False
    finally:
        sys.path[:] = before
    return all(is_installed_path(Path(path)) for path in paths)


def is_installed_path(path: Path) -> bool:
    """Return whether a path belongs to Python, hfpatch or an installed package, which may be editable."""
    return any(path.resolve().is_relative_to(folder) for folder in _installed_folders())


@cache
def _installed_folders() -> tuple[Path, ...]:
    """Return the folders of Python, of hfpatch and of packages, editable ones included."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    folders = [Path(folder) for folder in paths if folder]
    texts = [file.read_text(encoding="utf-8", errors="replace") for folder in folders for file in folder.glob("*.pth")]
    named = [Path(line.strip()) for text in texts for line in text.splitlines()]
    folders += [path for path in named if path.is_absolute() and path.is_dir()]
    for distribution in distributions(path=paths):
        where = json.loads(distribution.read_text("direct_url.json") or "{}")  # PEP 610
        if where.get("dir_info", {}).get("editable"):
            folders.append(Path(unquote(urlsplit(where["url"]).path)))
    return (Path(__file__).resolve().parents[1], *(folder.resolve() for folder in dict.fromkeys(folders)))
