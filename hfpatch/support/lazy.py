"""Public names that are imported when they are first used (PEP 562), so that importing a package stays cheap.

There are two installs: ``pip install hfpatch`` for the adapters, ``hfpatch[lab]`` to compare, evaluate and report too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hfpatch.errors import HfpatchError

LAB_PACKAGES = frozenset(
    {"accelerate", "datasets", "jinja2", "lm_eval", "matplotlib", "numpy", "rich", "scipy", "tokenizers", "typer"}
)
"""The packages that the extra ``lab`` installs, by the names that are imported."""


class MissingLabError(HfpatchError, ImportError):
    """A package that only ``hfpatch[lab]`` installs is missing."""


@contextmanager
def needing_lab() -> Iterator[None]:
    """Name the command that installs a package of :data:`LAB_PACKAGES` whose import fails.

    Raises:
        MissingLabError: in place of the ``ModuleNotFoundError``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in LAB_PACKAGES | {"pyarrow"}:  # which datasets brings
            raise
        raise MissingLabError(f"this needs {package}, which is not installed; pip install 'hfpatch[lab]'") from None


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: the package's full name.
        homes: for each public name the module below the package that defines it.

    Raises:
        MissingLabError: by the function, if the module needs a package of ``hfpatch[lab]`` that is not installed.
    """

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collection_paused(), needing_lab():
            module = import_module(f"{package}.{homes[name]}")
        return getattr(module, name)

    return getattr_


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection, which is a quarter of the time of importing torch and transformers and frees little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
