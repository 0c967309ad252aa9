"""Public names that are imported when they are first used (PEP 562), so that importing a package stays cheap."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hfpatch.support.lab import needing_lab


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
