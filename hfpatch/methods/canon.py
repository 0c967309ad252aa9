"""Canon layers: a short causal convolution around the attention, the one method here that mixes tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.nn import ShortConvolution, short_convolution
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite, Parts
from hfpatch.tuners.registration import method

CANON_PLACES = ("input", "qkv")


@method("canon", size="width")
@dataclass
class CanonConfig(MethodConfig):
    r"""Adds a weighted sum of the last positions to what enters the attention, or to query, key and value.

    .. math::
        x_t <- x_t + Σ_{j < n} w_j ⊙ x_{t-j}           w_j: one weight a column, 0 at init

    w = 0 makes it an exact no-op. It looks back within a document: x before its start is 0. Sources: Canon layers A
    and B of *Physics of Language Models: Part 4.1* (Allen-Zhu, 2025) without their activation; the depthwise
    convolution behind query, key and value of Primer, arXiv 2109.08668.

    Args:
        width: n, how many positions are added, the own one included.
        at: ``input`` is Canon-A, n·d parameters per layer; ``qkv`` is Canon-B, behind each projection and before the
            positions, n·(d_q + d_k + d_v) parameters per layer.

    Raises:
        HfpatchError: (a ``ValueError``) if a value is out of range or unknown.
    """

    width: int = field(default=4, metadata={"help": "How many positions are added, the own one included."})
    at: str = field(default="input", metadata={"help": "input (what enters the attention) or qkv."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1:
            raise HfpatchError(f"width={self.width} must be at least 1")
        if self.at not in CANON_PLACES:
            where = nearest(self.at, CANON_PLACES)
            raise HfpatchError(f"at={self.at!r} is not one of {', '.join(CANON_PLACES)}{where}")

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return the weights of every place, all zero."""
        sizes = {place: site.hidden_size if place == "entered" else site.width(place) for place in self.acts_at()}
        return nn.ModuleDict({place: ShortConvolution(size=size, width=self.width) for place, size in sizes.items()})

    def acts_at(self) -> tuple[str, ...]:
        """Return the places."""
        return ("entered",) if self.at == "input" else ("query", "key", "value")

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        return "it adds earlier positions" if self.width > 1 else None

    def steps_back(self) -> int:
        """Return how many earlier positions are read."""
        return self.width - 1

    def entered(self, parts: Parts, x: Tensor, site: MethodSite) -> Tensor:
        """Return what enters the attention ``(batch, seq, hidden)``."""
        return short_convolution(x, site.earlier(x, self.steps_back()), parts["entered"].weight)

    def query(self, parts: Parts, q: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the query ``(batch, seq, out)``."""
        return short_convolution(q, site.earlier(q, self.steps_back()), parts["query"].weight)

    def key(self, parts: Parts, k: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the key ``(batch, seq, out)``."""
        return short_convolution(k, site.earlier(k, self.steps_back()), parts["key"].weight)

    def value(self, parts: Parts, v: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the value ``(batch, seq, out)``."""
        return short_convolution(v, site.earlier(v, self.steps_back()), parts["value"].weight)
