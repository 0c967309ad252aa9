"""LoRA with a nonlinearity between its two matrices."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.nn import activation, low_rank_
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite, Parts
from hfpatch.tuners.registration import method

TARGETS = ("query", "key", "value", "output")


@method("nonlinear_lora", size="rank")
@dataclass
class NonlinearLoraConfig(MethodConfig):
    r"""LoRA with an activation between its matrices, on chosen projections of the attention.

    .. math::
        y = x W + (alpha / rank) σ(x A) B              A: in -> rank;  B: rank -> out

    x is what the projection reads: the attention's input, and for ``output`` the joined heads. A is drawn as LoRA draws
    it, U(-1/√in, 1/√in), and B = 0: an exact no-op. Parameters: rank·(in + out) per target and layer, as many as LoRA
    has. ``activation="identity"`` is LoRA itself. Source: AuroRA, arXiv 2505.18738, whose σ is a tanh plus a trained
    spline; LoRAN, arXiv 2509.21870, transforms the low-rank update itself.

    Args:
        rank: inner width.
        alpha: numerator of the factor of the change; None takes 2·rank, as LoRA does in recipes.
        activation: σ: gelu, relu, relu2, silu or identity.
        dropout: probability of dropping an entry of x in training, for the change alone.
        targets: which of query, key, value, output to change.

    Raises:
        HfpatchError: (a ``ValueError``) if a value is out of range or unknown.
    """

    rank: int = field(default=8, metadata={"help": "Inner width."})
    alpha: float | None = field(default=None, metadata={"help": "Numerator of alpha / rank; None: twice the rank."})
    activation: str = field(default="gelu", metadata={"help": "gelu, relu, relu2, silu or identity."})
    dropout: float = field(default=0.0, metadata={"help": "Probability of dropping an entry of x."})
    targets: tuple[str, ...] = field(
        default=("query", "value"), metadata={"help": "Which of query, key, value, output."}
    )

    def __post_init__(self) -> None:
        self.targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        super().__post_init__()
        activation(self.activation)
        if self.rank < 1:
            raise HfpatchError(f"rank={self.rank} must be at least 1")
        if self.alpha is not None and self.alpha <= 0:
            raise HfpatchError(f"alpha={self.alpha} must be above 0 (left out, it is twice the rank)")
        if not 0 <= self.dropout < 1:
            raise HfpatchError(f"dropout={self.dropout} must be at least 0 and below 1")
        for target in self.targets:
            if target not in TARGETS:
                raise HfpatchError(f"targets={target!r} is not one of {', '.join(TARGETS)}{nearest(target, TARGETS)}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise HfpatchError(f"targets={list(self.targets)} must name query, key, value or output, each at most once")

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return A (``down``) and B (``up``) of every target, and dropout where asked for."""
        parts = nn.ModuleDict({"dropout": nn.Dropout(self.dropout)} if self.dropout else {})
        for target in self.targets:
            read = site.mixed_size if target == "output" else site.hidden_size
            down, up = nn.Linear(read or 0, self.rank, bias=False), nn.Linear(self.rank, site.width(target), bias=False)
            low_rank_(down, up, seed=seed, name=f"{site.name}.{target}")
            parts.update({f"{target}_down": down, f"{target}_up": up})
        return parts

    def acts_at(self) -> tuple[str, ...]:
        """Return the targets."""
        return self.targets

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        if self.activation != "identity":
            return f"activation={self.activation!r} is not linear (activation='identity' is)"
        return None

    def query(self, parts: Parts, q: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the changed query ``(batch, seq, out)``."""
        return q + self.change("query", parts, x)

    def key(self, parts: Parts, k: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the changed key ``(batch, seq, out)``."""
        return k + self.change("key", parts, x)

    def value(self, parts: Parts, v: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the changed value ``(batch, seq, out)``."""
        return v + self.change("value", parts, x)

    def output(self, parts: Parts, o: Tensor, a: Tensor, site: MethodSite) -> Tensor:
        """Return the changed output ``(batch, seq, hidden)`` for the heads a ``(batch, seq, heads·size)``."""
        return o + self.change("output", parts, a)

    def change(self, target: str, parts: Parts, x: Tensor) -> Tensor:
        """Return σ(x A) B, scaled, ``(batch, seq, out)``."""
        down, up = parts[f"{target}_down"], parts[f"{target}_up"]
        if self.dropout:
            x = parts["dropout"](x)
        scale = 2.0 if self.alpha is None else self.alpha / self.rank
        changed: Tensor = up(activation(self.activation)(down(x))) * scale
        return changed
