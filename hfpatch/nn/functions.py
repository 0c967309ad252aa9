"""The activations and norms that the options of methods name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest

NORM_EPSILON = 1e-5

Activation = Callable[[Tensor], Tensor]


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,  # the exact one, x·Φ(x)
    "relu": torch.relu,
    "relu2": _relu_squared,
    "silu": F.silu,
    "identity": torch.positive,  # returns x itself; it makes a nonlinear map its capacity-matched linear control
}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "rmsnorm": partial(nn.RMSNorm, eps=NORM_EPSILON),
    "layernorm": partial(nn.LayerNorm, eps=NORM_EPSILON, bias=False),
    "none": nn.Identity,
}


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of autocast on a type of device; None where it is off, and on the meta device, which has none.

    Args:
        kind: such as ``x.device.type``.
    """
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def activation(name: str) -> Activation:
    """Return the elementwise function called ``name``.

    Raises:
        HfpatchError: if there is no activation of that name.
    """
    if name not in ACTIVATIONS:
        raise HfpatchError(f"activation={name!r} is not one of {', '.join(ACTIVATIONS)}{nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def make_norm(name: str, size: int) -> nn.Module:
    """Return a norm over the last dimension with a gain and no bias, eps 1e-5; ``none`` is the identity.

    Raises:
        HfpatchError: if there is no norm of that name.
    """
    if name not in NORMS:
        raise HfpatchError(f"norm {name!r} is not one of {', '.join(NORMS)}{nearest(name, NORMS)}")
    return NORMS[name](size)
