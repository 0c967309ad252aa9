"""Small facts about models and modules that differ between libraries: towers, paths, widths, wrappers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hfpatch.errors import HfpatchError

_WIDTHS = (("in_features", "out_features"), ("nx", "nf"))


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a ``PeftModel``, or the model itself."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def input_device(model: Any) -> torch.device:
    """Return the device that a model's tokens go to: the embeddings', also while accelerate keeps them elsewhere."""
    execution = getattr(getattr(model.get_input_embeddings(), "_hf_hook", None), "execution_device", None)
    device: torch.device = model.device if execution is None else torch.device(execution)
    return device


def codebooks(model: Any) -> int:
    """Return how many rows of token ids are together one row of a batch: MusicGen's codebooks."""
    return int(getattr(model.config, "num_codebooks", 1)) if "musicgen" in model.config.model_type else 1


def text_config(model: Any) -> Any:
    """Return the configuration of the text tower."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


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


def linear_paths(module: nn.Module, at: str) -> list[str]:
    """Return the paths of the matrices of a projection at the path ``at``.

    That is usually its own path. A projection composed of several matrices, or of none, returns those below it from a
    method ``linear_parts() -> list[str]``.
    """
    parts = getattr(unwrapped(module), "linear_parts", None)
    return [f"{at}.{part}" for part in parts()] if callable(parts) else [at]


def require_matrix(module: nn.Module, at: str) -> None:
    """Raise :class:`HfpatchError` if the module at the path ``at`` is composed of several matrices, or of none."""
    inside = linear_paths(module, at)
    if inside == [at]:
        return
    held = f"name those inside it: {', '.join(inside)}" if inside else "it contains none"
    raise HfpatchError(
        f"target_modules: {at} is not one matrix; {held} (hfpatch.surgery.budget.attention_modules(model), or "
        "target_modules: attention in a recipe, names all)"
    )


def linear_path(module: nn.Module, name: str) -> str | None:
    """Return the path of a linear module called so, possibly in a module of its own; None if there is none."""
    for path in (name, f"{name}.linear"):
        if has_module(module, path) and is_linear(unwrapped(submodule(module, path, of=path))):
            return path
    return None


def count_values(parameter: nn.Parameter) -> int:
    """Return how many values a parameter has; in 4 bits two share a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module says its input and output width, as :func:`features` reads them."""
    return any(hasattr(module, inputs) and hasattr(module, outputs) for inputs, outputs in _WIDTHS)


def features(module: nn.Module) -> tuple[int, int]:
    """Return (input, output) width of a Linear (also a quantised one) or a Conv1D.

    Raises:
        HfpatchError: if the module has neither ``in_features`` / ``out_features`` nor ``nx`` / ``nf``.
    """
    for inputs, outputs in _WIDTHS:
        if hasattr(module, inputs) and hasattr(module, outputs):
            return int(getattr(module, inputs)), int(getattr(module, outputs))
    raise HfpatchError(f"{type(module).__name__} is not a linear projection: it has no in_features / out_features")
