"""The code that decides what a model computes."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

from hfpatch.sites import base_model, family_of
from hfpatch.sites.family import load_plugins
from hfpatch.support.code import hash_code, module_of
from hfpatch.support.provenance import PACKAGES


def hash_model_code(model: nn.Module) -> str:
    """Return the hash of a model's code, see :func:`hfpatch.support.code.hash_code`.

    That is the classes of its modules, functions that modules hold in public attributes, and the declaration of its
    family, where they are from a modelling file beside the weights, an own method or another place than the packages
    whose versions results record. Those change state of their own as they run, which differs from process to process.
    """
    load_plugins()
    roots: list[Any] = list({type(module) for module in model.modules()})
    for module in model.modules():
        held = (value for name, value in vars(module).items() if name != "forward" and not name.startswith("_"))
        roots += [value for value in held if isinstance(value, FunctionType)]
    family = family_of(str(getattr(getattr(base_model(model), "config", None), "model_type", "")))
    roots += [family] if family is not None else []
    return hash_code([root for root in roots if module_of(root).partition(".")[0] not in PACKAGES])
