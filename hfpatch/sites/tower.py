"""The text tower of a model: the module that contains its decoder blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a ``PeftModel``, or the model itself."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def input_device(model: Any) -> torch.device:
    """Return the device that a model's tokens go to: the embeddings', also while accelerate keeps them elsewhere."""
    execution = getattr(getattr(model.get_input_embeddings(), "_hf_hook", None), "execution_device", None)
    device: torch.device = model.device if execution is None else torch.device(execution)
    return device


def text_tower(model: Any) -> tuple[str, nn.Module]:
    """Return (path, module) of the text tower: ``model.get_decoder()``.

    Where that is the model itself, or something without blocks (some models call their head ``decoder``), it is the
    base model.
    """
    candidates = [model.get_decoder() if hasattr(model, "get_decoder") else model]
    candidates += [getattr(model, name, model) for name in ("base_model", "model")]
    found = (c for c in candidates if c is not model and any(isinstance(m, nn.ModuleList) for m in c.modules()))
    tower = next(found, model)
    path = next((name for name, module in model.named_modules() if module is tower), "")
    return path, tower


def text_config(model: Any) -> Any:
    """Return the configuration of the text tower."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
