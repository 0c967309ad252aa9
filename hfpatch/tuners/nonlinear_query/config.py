"""Configuration of the nonlinear-query tuner."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from hfpatch.errors import HfpatchError, nearest
from hfpatch.nn import NORMS, activation
from hfpatch.sites import TARGETS
from hfpatch.tuners.config import SurgeryConfig
from hfpatch.tuners.registration import SurgeryType

ANCHORS = ("weight", "identity")
FORMS = ("preserving", "literal")


@dataclass
class NonlinearQueryConfig(SurgeryConfig):
    """Configuration of :class:`NonlinearQueryModel`: Q = (A(x) + f(x))/2, f(x) = LN(g(RMSNorm(x) W_1) W_2).

    Works in every PEFT call. See :class:`hfpatch.nn.NonlinearProjection` for the mathematics. Source: arXiv 2603.13381.

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
        self.peft_type = SurgeryType.NONLINEAR_QUERY
        activation(self.activation)
        choices = [("input_norm", tuple(NORMS)), ("output_norm", tuple(NORMS)), ("anchor", ANCHORS), ("form", FORMS)]
        values = [(name, getattr(self, name), known) for name, known in choices]
        for name, value, known in [*values, *(("targets", target, TARGETS) for target in self.targets)]:
            if value not in known:
                raise HfpatchError(f"{name}={value!r} is not one of {', '.join(known)}{nearest(str(value), known)}")
        if self.rank is not None and self.rank < 1:
            raise HfpatchError(f"rank={self.rank} must be at least 1 (None takes half the hidden size)")
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
