"""The dtypes of a run: what is trained, what is frozen, and what the forward pass computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from hfpatch.errors import HfpatchError
from hfpatch.recipes.training import Group, group_of


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return what is trained, by name, each tied tensor once.

    Raises:
        HfpatchError: if nothing is.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise HfpatchError("the model has nothing to train: every parameter is frozen; patch it first")
    return parameters


def cast_trainables(
    model: torch.nn.Module, dtype: torch.dtype, by_group: Mapping[Group, torch.dtype] | None = None
) -> None:
    """Give every trained tensor ``dtype``, or that of its group, in place; the frozen ones keep theirs."""
    for name, parameter in trainable_parameters(model).items():
        parameter.data = parameter.data.to((by_group or {}).get(group_of(name), dtype))


def autocast_context(dtype: str | None, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of the forward pass: autocast to ``dtype``, or nothing for None."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))
