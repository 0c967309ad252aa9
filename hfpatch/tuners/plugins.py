"""Methods of other packages: entry points of the group ``hfpatch.methods``, and classes named by their module."""

from __future__ import annotations

import functools
import logging
from importlib.metadata import EntryPoint

from hfpatch.errors import HfpatchError
from hfpatch.support import plugins
from hfpatch.tuners.config import MethodConfig

GROUP = "hfpatch.methods"
_BROKEN: dict[str, EntryPoint] = {}
_logger = logging.getLogger(__name__)


@functools.cache
def load_plugins() -> None:
    """Import the methods of every installed package that declares some; once in a process.

    An entry point is called as the method and names its class. One that cannot be loaded is a warning, and an error
    where its method is asked for: importing PEFT must not fail for a package that has nothing to do with it.
    """
    for entry in plugins.entries(GROUP):
        if plugins.being_imported(entry.module):
            continue  # its import has led to this one, and registers the method as it goes on
        try:
            _load(entry)
        except HfpatchError as error:
            _BROKEN[entry.name] = entry
            _logger.warning("hfpatch: %s", error)


def require_loaded(name: str) -> None:
    """Raise the error of the entry point that declares a method, if it could not be loaded and still cannot be.

    Raises:
        HfpatchError: naming the entry point.
    """
    if name in _BROKEN:
        _load(_BROKEN[name])
        del _BROKEN[name]


def named_method(reference: str) -> type[MethodConfig]:
    """Return the method that ``package.module:Class`` names.

    Raises:
        HfpatchError: if there is none.
    """
    return _method(plugins.named_object(reference), reference)


def _load(entry: EntryPoint) -> None:
    cls = _method(plugins.load(entry), plugins.where(entry))
    if cls.spec.name != entry.name:
        raise HfpatchError(f"{plugins.where(entry)} must be called {cls.spec.name!r}, as its method is")


def _method(found: object, where: str) -> type[MethodConfig]:
    if isinstance(found, type) and issubclass(found, MethodConfig) and "spec" in vars(found):
        return found
    raise HfpatchError(f"{where} is no method: put @hfpatch.method(...) above a dataclass below hfpatch.MethodConfig")
