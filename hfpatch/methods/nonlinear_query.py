"""Anchored nonlinear queries, keys and values."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.nn import NORMS, activation, anchor_preserving, anchored, make_norm, nonlinear_map
from hfpatch.nn.anchors import require_square
from hfpatch.nn.nonlinear import bottleneck_rank, init_nonlinear
from hfpatch.sites import TARGETS
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite, Parts
from hfpatch.tuners.registration import method

ANCHORS = ("weight", "identity")
FORMS = ("preserving", "literal")


@method("nonlinear_query", prefix="nonlinear_", child="hfpatch_query")
@dataclass
class NonlinearQueryConfig(MethodConfig):
    """Q = (A(x) + f(x))/2 with f(x) = LN(g(RMSNorm(x) W_1) W_2).

    Several adapters act one after the other, each anchored in the result of the one before it. In multi-head latent
    attention f reads what enters the attention, not the latent. Works in every PEFT call. See
    :class:`hfpatch.nn.NonlinearProjection` for the mathematics. Source: arXiv 2603.13381.

    Args:
        rank: r, the width of the bottleneck; None takes half the hidden size.
        activation: g: gelu, relu, relu2, silu, or identity (the capacity-matched linear control).
        input_norm: norm before W_1: rmsnorm, layernorm or none.
        output_norm: norm after W_2: layernorm, rmsnorm or none.
        anchor: ``weight`` is A(x) = x W_Q (+ b_Q), frozen, or whatever else the model itself takes for its query (one
            that was pretrained without W_Q, or with an f beside it); ``identity`` is A(x) = x, needs d_q = d and
            ``form="literal"``.
        form: ``preserving`` is Q = (2·x W_Q + f(x))/2, an exact no-op at init; ``literal`` is Q = (x W_Q + f(x))/2 as
            the paper writes it, which halves a pretrained model's attention logits at step 0.
        targets: which of query, key, value to change.

    Raises:
        HfpatchError: (a ``ValueError``) if a value is out of range or unknown, or two contradict each other.
    """

    rank: int | None = field(default=None, metadata={"help": "Width of the bottleneck; None takes half of d."})
    activation: str = field(default="gelu", metadata={"help": "gelu, relu, relu2, silu or identity."})
    input_norm: str = field(default="rmsnorm", metadata={"help": "rmsnorm, layernorm or none."})
    output_norm: str = field(default="layernorm", metadata={"help": "layernorm, rmsnorm or none."})
    anchor: str = field(default="weight", metadata={"help": "weight or identity."})
    form: str = field(default="preserving", metadata={"help": "preserving (an exact no-op at init) or literal."})
    targets: tuple[str, ...] = field(default=("query",), metadata={"help": "Which of query, key, value."})

    def __post_init__(self) -> None:
        self.targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        super().__post_init__()
        activation(self.activation)
        choices = [("input_norm", tuple(NORMS)), ("output_norm", tuple(NORMS)), ("anchor", ANCHORS), ("form", FORMS)]
        values = [(name, getattr(self, name), allowed) for name, allowed in choices]
        for name, value, allowed in [*values, *(("targets", target, TARGETS) for target in self.targets)]:
            if value not in allowed:
                raise HfpatchError(f"{name}={value!r} is not one of {', '.join(allowed)}{nearest(str(value), allowed)}")
        if self.rank is not None and self.rank < 1:
            raise HfpatchError(f"rank={self.rank} must be at least 1 (left out, it is half the hidden size)")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise HfpatchError(f"targets={list(self.targets)} must name query, key or value, each at most once")
        if self.anchor == "identity" and self.form == "preserving":
            raise HfpatchError(
                "anchor='identity' replaces the pretrained projection, so it cannot preserve the model; "
                "set form='literal'"
            )
        if {"query", "key"} <= set(self.targets):
            warnings.warn(
                "a nonlinear branch in both query and key adds a term f(x)·f(x) to the logits, and with "
                "anchor='identity' a parameter-free x·x",
                UserWarning,
                stacklevel=3,
            )

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return the norms and matrices of f for every target."""
        parts = nn.ModuleDict()
        for target in self.targets:
            width, rank = site.width(target), bottleneck_rank(site.hidden_size, self.rank)
            if self.anchor == "identity":
                require_square(site.hidden_size, width)
            up, down = nn.Linear(site.hidden_size, rank, bias=False), nn.Linear(rank, width, bias=False)
            norm_in, norm_out = make_norm(self.input_norm, site.hidden_size), make_norm(self.output_norm, width)
            at, silent = f"{site.name}.nonlinear_{target}", self.form == "preserving"
            init_nonlinear(up=up, down=down, norm_out=norm_out, silent=silent, seed=seed, name=at)
            made = {"norm_in": norm_in, "up": up, "down": down, "norm_out": norm_out}
            parts.update({f"{target}_{name}": module for name, module in made.items()})
        return parts

    def acts_at(self) -> tuple[str, ...]:
        """Return the targets."""
        return self.targets

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        norms = [name for name in ("input_norm", "output_norm") if getattr(self, name) != "none"]
        if norms:
            return (
                f"{norms[0]}={getattr(self, norms[0])!r} divides by the size of the input (without norms it is linear)"
            )
        if self.activation != "identity":
            return f"activation={self.activation!r} is not linear (activation='identity' is)"
        return None

    def query(self, parts: Parts, q: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the anchored query ``(batch, seq, out)``."""
        return self.anchored("query", parts, q, x)

    def key(self, parts: Parts, k: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the anchored key ``(batch, seq, out)``."""
        return self.anchored("key", parts, k, x)

    def value(self, parts: Parts, v: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the anchored value ``(batch, seq, out)``."""
        return self.anchored("value", parts, v, x)

    def anchored(self, target: str, parts: Parts, projected: Tensor, x: Tensor) -> Tensor:
        """Return the anchored projection of x ``(batch, seq, hidden)`` for x W as it is, both ``(batch, seq, out)``."""
        f = self.nonlinear(target, parts, x)
        if self.form == "preserving":
            return anchor_preserving(projected, f)
        return anchored(x.to(projected.dtype) if self.anchor == "identity" else projected, f)

    def nonlinear(self, target: str, parts: Parts, x: Tensor) -> Tensor:
        """Return f(x) ``(batch, seq, out)`` for x ``(batch, seq, hidden)``."""
        norm_in, up, down, norm_out = (parts[f"{target}_{name}"] for name in ("norm_in", "up", "down", "norm_out"))
        return nonlinear_map(x, norm_in=norm_in, up=up, act=activation(self.activation), down=down, norm_out=norm_out)
