"""The norms before and after a nonlinear map."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hfpatch.errors import HfpatchError, nearest

NORM_EPSILON = 1e-5


def _rmsnorm(size: int) -> nn.Module:
    return nn.RMSNorm(size, eps=NORM_EPSILON)


def _layernorm(size: int) -> nn.Module:
    return nn.LayerNorm(size, eps=NORM_EPSILON, bias=False)


def _none(size: int) -> nn.Module:
    return nn.Identity()


NORMS: dict[str, Callable[[int], nn.Module]] = {"rmsnorm": _rmsnorm, "layernorm": _layernorm, "none": _none}


def make_norm(name: str, size: int) -> nn.Module:
    """Return a norm over the last dimension with a gain and no bias, eps 1e-5; ``none`` is the identity.

    Raises:
        HfpatchError: if there is no norm of that name.
    """
    if name not in NORMS:
        raise HfpatchError(f"norm {name!r} is not one of {', '.join(NORMS)}{nearest(name, NORMS)}")
    return NORMS[name](size)
