"""Registering hfpatch's methods with PEFT without importing PEFT, which takes seconds.

``import hfpatch; from peft import PeftModel`` must suffice to load an adapter that hfpatch made, in either order.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def peft_is_imported() -> bool:
    """Return whether PEFT has been imported; as long as it is not, no model in this process has an adapter."""
    return "peft" in sys.modules


def register_when_peft_is_imported() -> None:
    """Register hfpatch's methods now if PEFT is imported already, or else as soon as it is."""
    if getattr(sys.modules.get("peft"), "PeftModel", None) is not None:
        importlib.import_module("hfpatch.tuners")
    elif "peft" not in sys.modules:
        sys.meta_path.insert(0, _PeftFinder())


class _PeftFinder(MetaPathFinder):
    """Finds PEFT once, where the other finders find it, and lets the registration follow its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "peft":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("peft")
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        importlib.import_module("hfpatch.tuners")
