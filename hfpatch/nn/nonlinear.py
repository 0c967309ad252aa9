"""The map f of the query path: a bottleneck between two norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.calls import CALLS, shared_inside
from hfpatch.nn.functions import NORM_EPSILON, Activation, activation, make_norm
from hfpatch.nn.initialization import normal_

MAX_EXPANSION = 1024
"""The largest inner width over the hidden size; a larger one is a typing mistake."""


def as_read_by(linear: nn.Module, x: Tensor) -> Tensor:
    """Return x in the dtype of a linear layer's weight, or unchanged where that is no float (quantised)."""
    weight: Tensor = linear.weight  # type: ignore[assignment]  # typed as tensor or module
    return x.to(weight.dtype) if weight.is_floating_point() else x


def nonlinear_map(
    x: Tensor, *, norm_in: nn.Module, up: nn.Linear, act: Activation, down: nn.Linear, norm_out: nn.Module
) -> Tensor:
    """Return f(x) = norm_out(g(norm_in(x) W_1) W_2) ``(batch, seq, out)`` in the dtype of the weights.

    x is ``(batch, seq, hidden)``, ``up`` is W_1: hidden -> rank, ``act`` is g, and ``down`` is W_2: rank -> out.
    """
    f: Tensor = norm_out(down(act(up(norm_in(as_read_by(up, x))))))
    return f


def bottleneck_rank(hidden_size: int, rank: int | None) -> int:
    """Return ``rank``, or d/2 where it is None.

    Raises:
        HfpatchError: if the rank is less than one or absurdly large, or d is odd and no rank is given.
    """
    if rank is None:
        if hidden_size % 2:
            raise HfpatchError(f"hidden size {hidden_size} is odd, so the rank cannot be half of it; give rank=N")
        return hidden_size // 2
    if rank < 1:
        raise HfpatchError(f"rank={rank} must be at least 1 (left out, it is half the hidden size)")
    if rank > MAX_EXPANSION * hidden_size:
        raise HfpatchError(f"rank={rank} must be at most {MAX_EXPANSION} times the hidden size, {hidden_size}")
    return rank


class NonlinearProjection(nn.Module):
    """A bottleneck MLP between two norms.

    .. math::
        f(x) = LN( g( RMSNorm(x) W_1 ) W_2 )           W_1: d -> r,  W_2: r -> d_q

    Without biases; LN has a gain and no bias; both eps are 1e-5. With g = identity it is the capacity-matched linear
    control. Parameters: d·r + r·d_q and the gains; r = d/2 and d_q = d give d² + O(d).
    Source: arXiv 2603.13381, *Beyond Linearity in Attention Projections*.

    W_1 and W_2 are drawn from N(0, 1/fan_in), which keeps the bottleneck at unit scale at any width.

    Args:
        hidden_size: d, the width of the hidden state.
        out_features: d_q, the width of the query.
        rank: r; None takes d/2.
        activation_name: g, a key of :data:`hfpatch.nn.ACTIVATIONS`.
        input_norm: the norm before W_1, a key of :data:`hfpatch.nn.NORMS`.
        output_norm: the norm after W_2, a key of :data:`hfpatch.nn.NORMS`.
        silent: start at f = 0 exactly: the output norm's gain is 0, or W_2 is 0 where there is no output norm.
        seed: seed of the initialisation.

    Raises:
        HfpatchError: if an argument is out of range or unknown.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        out_features: int,
        rank: int | None = None,
        activation_name: str = "gelu",
        input_norm: str = "rmsnorm",
        output_norm: str = "layernorm",
        silent: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        rank = bottleneck_rank(hidden_size, rank)
        self.act = activation(activation_name)
        self.norm_in = make_norm(input_norm, hidden_size)
        self.up = nn.Linear(hidden_size, rank, bias=False)
        self.down = nn.Linear(rank, out_features, bias=False)
        self.norm_out = make_norm(output_norm, out_features)
        init_nonlinear(up=self.up, down=self.down, norm_out=self.norm_out, silent=silent, seed=seed, name="nonlinear")

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``(batch, seq, hidden)`` to f(x) ``(batch, seq, out_features)``."""
        return nonlinear_map(x, norm_in=self.norm_in, up=self.up, act=self.act, down=self.down, norm_out=self.norm_out)

    def from_joined(self, x: Tensor, product: Tensor) -> Tensor:
        """Return f(x) from the product x·(g ⊙ W_1): RMSNorm(x) W_1 = (x·(g ⊙ W_1)) / rms(x).

        Args:
            x: ``(batch, seq, hidden)``.
            product: ``(batch, seq, rank)``.
        """
        if isinstance(self.norm_in, nn.RMSNorm):
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
            inverse_rms = torch.rsqrt(norm.square() / x.shape[-1] + NORM_EPSILON)  # (batch, seq, 1), in fp32 at least
            product = (product * inverse_rms).to(product.dtype)  # rounded once
        inner = shared_inside(self.up)
        if inner is not None and inner is not self.up:  # an adapter adds its own term
            normed = self.norm_in(as_read_by(self.up, x))
            CALLS.keep(inner, "product", (normed, product))
            product = self.up(normed)
        f: Tensor = self.norm_out(self.down(self.act(product)))
        return f


def init_nonlinear(
    *, up: nn.Linear, down: nn.Linear, norm_out: nn.Module, silent: bool, seed: int, name: str, std: float | None = None
) -> None:
    """Initialise the matrices in place; ``name`` distinguishes the places in a model.

    They are drawn from N(0, std²), or from N(0, 1/fan_in) where ``std`` is None.
    """
    for part, linear in (("up", up), ("down", down)):
        normal_(linear.weight, std=std or linear.in_features**-0.5, seed=seed, name=f"{name}_{part}")
    if silent:
        last = norm_out if isinstance(norm_out, nn.LayerNorm | nn.RMSNorm) else down
        nn.init.zeros_(last.weight)
