"""An edit of a linear subspace of a representation."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.nn import orthonormal_, orthonormal_rows
from hfpatch.sites import AttentionSite
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import ENDS, MethodSite, Parts
from hfpatch.tuners.registration import method


@method("loreft", size="rank")
@dataclass
class LoReFTConfig(MethodConfig):
    r"""Replaces what a representation h holds in a subspace of ``rank`` dimensions, at every position.

    .. math::
        h + R^T (W h + b - R h)                        R, W: d -> rank;  b: rank;  R R^T = 1

    h is the attention branch as it joins the residual stream, or the residual stream behind the block. Trained are M,
    of which R is the orthonormalised form in every call (see :func:`hfpatch.nn.orthonormal_rows`), V = W - R and b.
    V = 0 and b = 0 at init, so that h + R^T (V h + b) is h, bit for bit, on every device; and weight decay leads back
    there. Parameters: 2·d·rank + rank per layer. Source: arXiv 2404.03592, *ReFT: Representation Finetuning for
    Language Models*, which edits chosen positions of the prompt and draws W at random.

    Args:
        rank: dimensions of the subspace, at most the width of the residual stream.
        at: ``branch`` or ``stream``.

    Raises:
        HfpatchError: (a ``ValueError``) if a value is out of range or unknown.
    """

    rank: int = field(default=4, metadata={"help": "Dimensions of the subspace."})
    at: str = field(default="stream", metadata={"help": "branch or stream."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise HfpatchError(f"rank={self.rank} must be at least 1")
        if self.at not in ENDS:
            raise HfpatchError(f"at={self.at!r} is not one of {', '.join(ENDS)}{nearest(self.at, ENDS)}")

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return M (``rows``), and V and b (``shift``)."""
        if self.rank > site.stream_size:
            raise HfpatchError(
                f"rank={self.rank} must be at most {site.stream_size}, the width of the residual stream: a subspace "
                "has no more dimensions"
            )
        rows, shift = nn.Linear(site.stream_size, self.rank, bias=False), nn.Linear(site.stream_size, self.rank)
        orthonormal_(rows.weight, seed=seed, name=f"{site.name}.rows")
        nn.init.zeros_(shift.weight)
        nn.init.zeros_(shift.bias)
        return nn.ModuleDict({"rows": rows, "shift": shift})

    def acts_at(self) -> tuple[str, ...]:
        """Return where it acts."""
        return (ENDS[self.at],)

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        return "there is no matrix behind the block (at='branch' there is)" if self.at == "stream" else None

    def left(self, parts: Parts, branch: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the branch ``(batch, seq, hidden)``, edited as the stream is."""
        return self.stream(parts, branch, site)

    def stream(self, parts: Parts, h: Tensor, site: MethodSite) -> Tensor:
        """Return h + Rᵀ (V h + b) ``(batch, seq, hidden)``."""
        edit: Tensor = parts["shift"](h) @ orthonormal_rows(parts["rows"].weight)
        return h + edit

    def refusal(self, site: AttentionSite) -> str | None:
        """Return why the branch cannot be edited alone, if so."""
        return site.refusals.get("branch") if self.at == "branch" else None
