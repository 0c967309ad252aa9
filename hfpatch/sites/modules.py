"""Small facts about modules that differ between libraries: paths, widths, wrappers."""

from __future__ import annotations

from torch import nn

from hfpatch.errors import HfpatchError


def submodule(root: nn.Module, path: str, *, of: str) -> nn.Module:
    """Return the module at the dotted ``path`` below ``root``; ``of`` names the declaration in the error.

    Raises:
        HfpatchError: naming the attribute that is missing.
    """
    module = root
    for name in path.split(".") if path else []:
        child = getattr(module, name, None)
        if not isinstance(child, nn.Module):
            raise HfpatchError(f"{of}: {type(module).__name__} has no module {name!r} (declared path: {path!r})")
        module = child
    return module


def has_module(root: nn.Module, path: str) -> bool:
    """Return whether there is a module at the dotted ``path`` below ``root``."""
    module: object = root
    for name in path.split("."):
        module = getattr(module, name, None)
    return isinstance(module, nn.Module)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the original module inside a PEFT layer, or the module itself."""
    base = getattr(module, "get_base_layer", None)
    return base() if callable(base) else module


def features(module: nn.Module) -> tuple[int, int]:
    """Return (input, output) width of a Linear (also a quantised one) or a Conv1D.

    Raises:
        HfpatchError: if the module has neither ``in_features`` / ``out_features`` nor ``nx`` / ``nf``.
    """
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        if hasattr(module, inputs) and hasattr(module, outputs):
            return int(getattr(module, inputs)), int(getattr(module, outputs))
    raise HfpatchError(f"{type(module).__name__} is not a linear projection: it has no in_features / out_features")
