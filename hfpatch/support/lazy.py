"""Public names that are imported when they are first used (PEP 562), and the packages of the extra ``lab``."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hfpatch.errors import HfpatchError

LAB_PACKAGES = frozenset(
    {"accelerate", "datasets", "jinja2", "lm_eval", "matplotlib", "numpy", "rich", "scipy", "tokenizers", "typer"}
)
"""The import names of the packages that the extra ``lab`` installs."""


class MissingLabError(HfpatchError, ImportError):
    """A package that only ``hfpatch[lab]`` installs is missing."""


@contextmanager
def needing_lab() -> Iterator[None]:
    """Raise :class:`MissingLabError` with the command to install a missing package of :data:`LAB_PACKAGES`."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in LAB_PACKAGES | {"pyarrow"}:  # which datasets brings
            raise
        raise MissingLabError(f"this needs {package}, which is not installed; pip install 'hfpatch[lab]'") from None


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package with the public ``names`` of each of its modules.

    For type checkers the package imports them ``as`` themselves, which marks them as public without a third list.
    """
    homes = {name: module for module, public in names.items() for name in public}

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collection_paused(), needing_lab():
            module = import_module(f"{package}.{homes[name]}")
        return getattr(module, name)

    return getattr_


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection, which takes a quarter of the import time of torch and transformers and frees little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze() -> None:
    """Leave what libraries hold out of collections, until the process ends.

    torch 2.15 loads Triton, which would report what is frozen then as leaks, in sixty lines.
    """
    gc.freeze()
    atexit.register(_unfreeze_for_triton)


def _unfreeze_for_triton() -> None:
    if "triton" in sys.modules:  # else the collection at the end, up to a second, is saved
        gc.unfreeze()
