"""The activations that the methods and their linear controls use."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.errors import HfpatchError, nearest

Activation = Callable[[Tensor], Tensor]


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,  # the exact one, x·Φ(x)
    "relu": torch.relu,
    "relu2": _relu_squared,
    "silu": F.silu,
    "identity": _identity,  # turns a nonlinear map into its capacity-matched linear control
}


def activation(name: str) -> Activation:
    """Return the elementwise function called ``name``.

    Raises:
        HfpatchError: if there is no activation of that name.
    """
    if name not in ACTIVATIONS:
        raise HfpatchError(f"activation={name!r} is not one of {', '.join(ACTIVATIONS)}{nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]
