"""Finding out where in a model numbers stop being finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def first_not_finite(model: Any, tokens: Tensor) -> str | None:
    """Return the name of the first module whose output holds NaN or infinity on tokens (batch, seq), or None.

    A module is done before what it is part of, so that the name is that of the smallest part.
    """
    found: list[str] = []
    with _watched(model, found):
        model(tokens)
    return found[0] if found else None


@contextmanager
def _watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    handles = [module.register_forward_hook(_watch(name, found)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, found: list[str]) -> Any:
    def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
        if not found and not all(bool(tensor.isfinite().all()) for tensor in _tensors(output)):
            found.append(name or "the whole model")

    return hook


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
