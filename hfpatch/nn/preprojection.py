"""Pre-projection: a residual MLP before W_Q, W_K and W_V. Content skip: x~ added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.functions import Activation, activation, autocast_dtype
from hfpatch.nn.initialization import normal_
from hfpatch.nn.nonlinear import MAX_EXPANSION

PAPER_STD = 0.01
PAPER_SKIP_STD = 1e-4


def inner_width(hidden_size: int, expansion: float) -> int:
    """Return the inner width int(e·d).

    Raises:
        HfpatchError: if that is less than one, or e is out of range.
    """
    if not 0 < expansion <= MAX_EXPANSION:
        raise HfpatchError(f"expansion={expansion} must be above 0 and at most {MAX_EXPANSION}")
    width = int(expansion * hidden_size)
    if width < 1:
        raise HfpatchError(
            f"expansion={expansion} gives an inner width of {width} at hidden size {hidden_size}; raise it"
        )
    return width


def pre_project(
    x: Tensor,
    *,
    up: nn.Linear,
    down: nn.Linear,
    gate: nn.Linear | None,
    act: Activation,
    dropout: nn.Module | None = None,
) -> Tensor:
    """Return x~ = x + W_down σ(W_up x), or x + W_down (σ(W_gate x) ⊙ W_up x) with a gate.

    x and x~ are ``(batch, seq, hidden)``; ``dropout`` drops inner activations in training.
    Computed in the dtype of the weights and returned in that of ``x``, so that fp32 weights serve any base.
    """
    h = _as_read_by(up, x)
    inner = act(up(h)) if gate is None else act(gate(h)) * up(h)  # (batch, seq, inner)
    if dropout is not None:
        inner = dropout(inner)
    changed: Tensor = x + down(inner)
    return changed.to(x.dtype)


class PreProjection(nn.Module):
    """A position-agnostic residual MLP before the attention's projections.

    .. math::
        x~ = x + W_down σ(W_up x)                      (plain)
        x~ = x + W_down (σ(W_gate x) ⊙ W_up x)         (gated)

    with inner width int(e·d) and no biases. Position enters only afterwards, so position encodings such as RoPE are
    unchanged. Source: arXiv 2604.10791, *Position-Agnostic Pre-Projection for Transformer Attention*.

    Args:
        hidden_size: d, the width of the hidden state.
        expansion: e, the inner width as a multiple of d.
        activation_name: σ, a key of :data:`hfpatch.nn.ACTIVATIONS`.
        gated: use the gated form.
        dropout: probability of dropping an inner activation in training.
        init: ``identity`` sets W_down = 0, an exact no-op; ``paper`` draws W_down ~ N(0, 0.01²). The others are
            N(0, 0.01²) in both.
        seed: seed of the initialisation.
        name: distinguishes the initial values of several such modules of one seed.

    Raises:
        HfpatchError: if an argument is out of range or unknown.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        expansion: float = 1.25,
        activation_name: str = "silu",
        gated: bool = False,
        dropout: float = 0.0,
        init: str = "identity",
        seed: int = 0,
        name: str = "preproj",
    ) -> None:
        super().__init__()
        check_init(init)
        inner = inner_width(hidden_size, expansion)
        self.act = activation(activation_name)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.up = nn.Linear(hidden_size, inner, bias=False)
        self.gate = nn.Linear(hidden_size, inner, bias=False) if gated else None
        self.down = nn.Linear(inner, hidden_size, bias=False)
        normal_(self.up.weight, std=PAPER_STD, seed=seed, name=f"{name}_up")
        if self.gate is not None:
            normal_(self.gate.weight, std=PAPER_STD, seed=seed, name=f"{name}_gate")
        if init == "identity":
            nn.init.zeros_(self.down.weight)
        else:
            normal_(self.down.weight, std=PAPER_STD, seed=seed, name=f"{name}_down")

    def forward(self, x: Tensor) -> Tensor:
        """Map x to x~, both ``(batch, seq, hidden)``."""
        return pre_project(x, up=self.up, down=self.down, gate=self.gate, act=self.act, dropout=self.dropout)


class ContentSkip(nn.Module):
    """A linear path around the attention.

    .. math::
        residual += attention(q, k, v) + x~ W_skip           W_skip: d -> d, no bias

    The skip must reach the residual stream unchanged: after a norm that follows the attention (sandwich norms), and
    not multiplied by a residual multiplier. Source: arXiv 2604.10791.

    Args:
        hidden_size: d, the width of the hidden state.
        init: ``identity`` sets W_skip = 0, an exact no-op; ``paper`` draws W_skip ~ N(0, (1e-4)²).
        seed: seed of the initialisation.
        name: distinguishes the initial values of several such modules of one seed.

    Raises:
        HfpatchError: if ``init`` is unknown.
    """

    def __init__(self, *, hidden_size: int, init: str = "identity", seed: int = 0, name: str = "preproj") -> None:
        super().__init__()
        check_init(init)
        self.skip = nn.Linear(hidden_size, hidden_size, bias=False)
        if init == "identity":
            nn.init.zeros_(self.skip.weight)
        else:
            normal_(self.skip.weight, std=PAPER_SKIP_STD, seed=seed, name=f"{name}_skip")

    def forward(self, branch: Tensor, x: Tensor) -> Tensor:
        """Return ``branch + x W_skip``; all ``(batch, seq, hidden)``, in the dtype of ``branch``."""
        return add_skip(branch, x, self.skip)


def add_skip(branch: Tensor, x: Tensor, skip: nn.Linear) -> Tensor:
    """Return ``branch + x W_skip`` computed in the dtype of W_skip, returned in that of ``branch``."""
    changed: Tensor = branch + skip(_as_read_by(skip, x))
    return changed.to(branch.dtype)


def _as_read_by(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return x in the dtype of a linear layer's weight; unchanged under autocast, which would round it back."""
    return x.to(linear.weight.dtype) if autocast_dtype(x.device.type) is None else x


def check_init(init: str) -> None:
    """Raise :class:`HfpatchError` unless ``init`` is ``identity`` or ``paper``."""
    if init not in ("identity", "paper"):
        raise HfpatchError(f"init={init!r} is not one of identity (an exact no-op), paper (near-identity)")
