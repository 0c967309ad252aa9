"""Registering hfpatch's methods with PEFT without importing PEFT, which takes seconds.

``import hfpatch`` and ``from peft import PeftModel``, in either order, suffice to load an adapter of hfpatch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register_when_peft_is_imported() -> None:
    """Register hfpatch's methods now if PEFT is imported already, or else as soon as it is."""
    if sys.modules.get("peft") is not None:
        importlib.import_module("peft")  # waits if another thread is importing it
    if getattr(sys.modules.get("peft"), "PeftModel", None) is not None:
        importlib.import_module("hfpatch.methods")
    elif not any(isinstance(finder, _PeftFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PeftFinder())


class _PeftFinder:
    """A finder that lets the registration follow PEFT's import.

    It stays until PEFT is imported: programs such as transformers may only look whether PEFT is installed.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "peft":
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _RegisteringLoader(spec.loader)  # type: ignore[assignment]  # has the methods of a loader
        return spec


class _RegisteringLoader:
    """A wrapper of PEFT's loader that also registers hfpatch's methods.

    It has no base class: importing ``importlib.abc`` takes as long as the rest of ``import hfpatch``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        from hfpatch.support.quiet import quiet_kernels

        with quiet_kernels():  # PEFT imports every library of quantised layers
            self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _PeftFinder)]
        importlib.import_module("hfpatch.methods")
