"""Temporary changes: attributes of any object; of a model its mode, hooks, ``requires_grad`` flags; checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object or a module other attributes, and restore its own, or those of its class, at the end."""
    before = {name: value for name, value in vars(owner).items() if name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        vars(owner).update(before)
        for name in attributes.keys() - before.keys():
            del vars(owner)[name]


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


def set_checkpointing(model: Any, *, reentrant: bool | None) -> None:
    """Recompute a model's activations in the backward pass, by one of torch's two kinds, or with None stop doing so.

    ``transformers`` names it activation checkpointing, or gradient checkpointing before version 5.10.
    """
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if reentrant is None:
        getattr(model, f"{kind}_checkpointing_disable")()
    else:
        enable = getattr(model, f"{kind}_checkpointing_enable")
        enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": reentrant}})


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
