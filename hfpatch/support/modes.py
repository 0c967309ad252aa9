"""Temporary changes to a model: evaluation mode, hooks, ``requires_grad`` flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore the mode of each module at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def keeping_flags(model: nn.Module) -> Iterator[None]:
    """Restore the ``requires_grad`` flags of all parameters at the end."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad = flag
