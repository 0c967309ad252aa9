"""Anchored queries: an anchor A and a map f, combined to (A + f)/2 or (2A + f)/2."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.initialization import normal_
from hfpatch.nn.nonlinear import NonlinearProjection


def anchored(anchor: Tensor, f: Tensor) -> Tensor:
    """Return (A + f)/2, as written in arXiv 2603.13381; in the dtype of the anchor. Shapes ``(batch, seq, out)``."""
    return ((anchor + f) / 2).to(anchor.dtype)


def anchor_preserving(anchor: Tensor, f: Tensor) -> Tensor:
    """Return (2A + f)/2: the frozen anchor counts twice, so f = 0 leaves it unchanged, bit for bit.

    The literal form halves a pretrained model's attention logits at step 0; this one does not.
    """
    return (anchor + f / 2).to(anchor.dtype)  # the same number: doubling and halving are exact


class IdentityAnchoredQuery(nn.Module):
    """A query without W_Q, for pretraining from scratch; needs d_q = d.

    .. math::
        Q = x                       f = none
        Q = x + x W                 f = linear, one d × d matrix
        Q = (x + f(x)) / 2          f = nonlinear, see :class:`NonlinearProjection`

    Source: arXiv 2603.13381; the first form also arXiv 2510.23912.

    Args:
        hidden_size: d.
        out_features: d_q.
        f: ``none``, ``linear`` or ``nonlinear``.
        seed: seed of the initialisation.
        **options: passed to :class:`NonlinearProjection`.

    Raises:
        HfpatchError: if d_q differs from d, or ``f`` is unknown.
    """

    def __init__(
        self, *, hidden_size: int, out_features: int, f: str = "nonlinear", seed: int = 0, **options: Any
    ) -> None:
        super().__init__()
        require_square(hidden_size, out_features)
        self.is_linear = f in ("none", "linear")  # an adapter around f hides its class
        if f == "none":
            self.f: nn.Module | None = None
        elif f == "linear":
            self.f = nn.Linear(hidden_size, hidden_size, bias=False)
            normal_(self.f.weight, std=hidden_size**-0.5, seed=seed, name="linear")
        elif f == "nonlinear":
            self.f = NonlinearProjection(hidden_size=hidden_size, out_features=out_features, seed=seed, **options)
        else:
            raise HfpatchError(f"f={f!r} is not one of none, linear, nonlinear")

    def forward(self, x: Tensor, f: Tensor | None = None) -> Tensor:
        """Map x to Q, both ``(batch, seq, hidden)``; ``f`` is a nonlinear f(x) that is computed already."""
        if self.f is None:
            return x
        return x + self.f(x) if self.is_linear else anchored(x, self.f(x) if f is None else f)


class WeightAnchoredQuery(nn.Module):
    """Q = (x W_Q + f(x)) / 2 with a W_Q that is trained too, for pretraining from scratch.

    Source: arXiv 2603.13381.

    Args:
        hidden_size: d.
        out_features: d_q.
        bias: whether the anchor has a bias, Q = (x W_Q + b_Q + f(x)) / 2.
        seed: seed of the initialisation of f; that of W_Q is left to the caller.
        **options: passed to :class:`NonlinearProjection`.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        out_features: int,
        bias: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.anchor = nn.Linear(hidden_size, out_features, bias=bias)
        self.f = NonlinearProjection(hidden_size=hidden_size, out_features=out_features, seed=seed, **options)

    def forward(self, x: Tensor, f: Tensor | None = None) -> Tensor:
        """Map x ``(batch, seq, hidden)`` to Q ``(batch, seq, out_features)``; ``f`` is f(x), if computed already."""
        f = self.f(x) if f is None else f  # before the anchor: the gradients by x are summed in this order
        return anchored(self.anchor(x), f)


def require_square(hidden_size: int, out_features: int) -> None:
    """Raise :class:`HfpatchError` unless an identity anchor is possible, that is d_q = d."""
    if hidden_size != out_features:
        raise HfpatchError(
            f"anchor='identity' needs a query as wide as the hidden state, but d_q={out_features} and d={hidden_size}; "
            "use anchor='weight'"
        )
