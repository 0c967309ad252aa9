"""A bottleneck beside the attention, or on the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.nn import activation, low_rank_
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import ENDS, MethodSite, Parts
from hfpatch.tuners.registration import method


@method("parallel_adapter", size="rank")
@dataclass
class ParallelAdapterConfig(MethodConfig):
    r"""Adds a bottleneck to the attention branch, or to the residual stream behind the block.

    .. math::
        branch += σ(x D) U                             at="branch": x is the attention's input
        h += σ(h D) U                                  at="stream": h is the residual stream behind the block

    D: d -> rank is drawn as LoRA's A, U: rank -> d is 0: an exact no-op. Parameters: 2·d·rank per layer. On the branch
    it is parallel to the attention, as in arXiv 2110.04366, *Towards a Unified View of Parameter-Efficient Transfer
    Learning*; on the stream it is one further residual layer, as in arXiv 1902.00751 without its biases.

    Args:
        rank: inner width.
        activation: σ: gelu, relu, relu2, silu or identity.
        at: ``branch`` or ``stream``.

    Raises:
        HfpatchError: (a ``ValueError``) if a value is out of range or unknown.
    """

    rank: int = field(default=8, metadata={"help": "Inner width."})
    activation: str = field(default="relu", metadata={"help": "gelu, relu, relu2, silu or identity."})
    at: str = field(default="branch", metadata={"help": "branch or stream."})

    def __post_init__(self) -> None:
        super().__post_init__()
        activation(self.activation)
        if self.rank < 1:
            raise HfpatchError(f"rank={self.rank} must be at least 1")
        if self.at not in ENDS:
            raise HfpatchError(f"at={self.at!r} is not one of {', '.join(ENDS)}{nearest(self.at, ENDS)}")

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return D (``down``) and U (``up``)."""
        read = site.hidden_size if self.at == "branch" else site.stream_size
        down, up = nn.Linear(read, self.rank, bias=False), nn.Linear(self.rank, site.stream_size, bias=False)
        low_rank_(down, up, seed=seed, name=site.name)
        return nn.ModuleDict({"down": down, "up": up})

    def acts_at(self) -> tuple[str, ...]:
        """Return where it acts."""
        return (ENDS[self.at],)

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        if self.activation != "identity":
            return f"activation={self.activation!r} is not linear (activation='identity' is)"
        return (
            "no matrix of the block leads past the attention"
            if self.at == "branch"
            else "no matrix is behind the block"
        )

    def left(self, parts: Parts, branch: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the branch + σ(x D) U ``(batch, seq, hidden)``."""
        added: Tensor = parts["up"](activation(self.activation)(parts["down"](x)))
        return branch + added

    def stream(self, parts: Parts, h: Tensor, site: MethodSite) -> Tensor:
        """Return h + σ(h D) U ``(batch, seq, hidden)``."""
        return self.left(parts, h, h, site)
