"""The hidden state among the arguments and results of an attention module, whatever its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

HIDDEN = "hidden_states"
RESIDUAL = "residual"


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state ``(batch, seq, hidden)``: the keyword ``hidden_states`` or the first argument."""
    hidden: Tensor = kwargs[HIDDEN] if HIDDEN in kwargs else next(iter((*args, *kwargs.values())))
    return hidden


def replace_hidden(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace every argument that *is* the hidden state; one called ``residual`` is left alone.

    Some attentions take the same tensor several times (as query, key and value). BLOOM passes the residual, which by
    configuration can be the very same tensor and must not change. ``names`` are the `argument_names` of the module.
    """
    old = hidden_argument(args, kwargs)
    residual = names.index(RESIDUAL) if RESIDUAL in names else None
    positional = tuple(new if value is old and index != residual else value for index, value in enumerate(args))
    keywords = {name: new if value is old and name != RESIDUAL else value for name, value in kwargs.items()}
    return positional, keywords


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the argument names of a module's ``forward``, without ``self``; slow, so not for use in a forward pass."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def replace_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to the hidden state in a module's output: the tensor itself or the first of a sequence.

    The type of the sequence is kept (tuple, list or named tuple).
    """
    if isinstance(output, Tensor):
        return change(output)
    first = change(output[0])
    if hasattr(output, "_replace"):
        return output._replace(**{output._fields[0]: first})
    return type(output)([first, *output[1:]])
