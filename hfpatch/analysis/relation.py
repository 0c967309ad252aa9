"""The Q-K relation of a head, B = W_Q W_Kᵀ, in numbers that do not depend on the basis inside the head.

The logit of a query at x and a key at y is x B yᵀ (up to the softmax's scale): the head depends on W_Q and W_K only
through B, so the pair (W_Q A, W_K A⁻ᵀ) is the same head for every invertible A (the gauge). With RoPE the logit at the
relative offset Δ = i − j is x B(Δ) yᵀ with B(Δ) = W_Q R(Δ) W_Kᵀ; the gauge is then the A that commute with every R(Δ).
Where queries and keys are normed in between (Qwen 3, Gemma 3), B(Δ) = W_Q diag(g_Q) R(Δ) diag(g_K) W_Kᵀ has the norms'
gains, and the logit is x B(Δ) yᵀ up to a positive factor of each query and of each key, which B cannot have.

B = S + N with S = (B + Bᵀ)/2 symmetric ("tokens like each other attend to each other", or avoid each other where an
eigenvalue is negative) and N = (B − Bᵀ)/2 antisymmetric (direction: x looks at y as y does not look at x).

B is d × d but of rank at most k, the head size, and S of rank at most 2k, so no d × d matrix is formed: with
[W_Q W_K] = P [R_Q R_K], P having orthonormal columns, B = P C Pᵀ for C = R_Q R(Δ) R_Kᵀ of size 2k × 2k, which has B's
norms and S's non-zero eigenvalues. If 2k <= d and [W_Q W_K] has full rank, S always has exactly k positive and k
negative eigenvalues (Sylvester's law of inertia); the share of S's energy on the positive side is more informative
than the count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.analysis.heads import HeadWeights, norm_gains
from hfpatch.analysis.rotary import rotary_of
from hfpatch.errors import HfpatchError
from hfpatch.sites import find_sites

OFFSETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
ZERO = 1e-10
"""Eigenvalues below this share of the largest one count as zero."""


@dataclass(frozen=True)
class Relation:
    """Invariants of B, or of B at one offset, under a change of basis inside the head.

    Attributes:
        norm: ‖B‖ in the Frobenius norm.
        symmetric: ‖S‖² / ‖B‖², from 0 to 1; the antisymmetric part has the rest, and random weights have 0.5.
        positive, negative: eigenvalues of S above and below zero.
        positive_energy: the share of ‖S‖² that is in the positive ones.
        effective_rank: exp of the entropy of |λ| / Σ|λ| over S's eigenvalues (Roy and Vetterli, 2007).
    """

    norm: float
    symmetric: float
    positive: int
    negative: int
    positive_energy: float
    effective_rank: float


@dataclass(frozen=True)
class HeadRelation:
    """The Q-K relation of a query head with the key head that it reads, by offset; only 0 without rotary positions."""

    layer: int
    head: int
    key_head: int
    by_offset: dict[int, Relation]

    @property
    def here(self) -> Relation:
        """The relation at the smallest offset."""
        return self.by_offset[min(self.by_offset)]


def head_relations(
    model: nn.Module, weights: Iterable[HeadWeights], offsets: Sequence[int] = OFFSETS
) -> list[HeadRelation]:
    """Return the relation of every head at relative offsets; the model gives the rotation of the heads.

    The weights of the layers come from :func:`hfpatch.analysis.heads.head_weights` (before or after patching) or
    :func:`hfpatch.analysis.linearised.linearise`.

    Raises:
        HfpatchError: if no offset is given, or one is below zero.
    """
    if not offsets or min(offsets) < 0:
        raise HfpatchError(f"offsets={list(offsets)} must be whole numbers from 0 on, at least one")
    sites = {site.layer: site for site in find_sites(model)}
    heads = []
    for layer in weights:
        rotary = rotary_of(model, sites[layer.layer])
        if (gains := norm_gains(sites[layer.layer])) is not None:
            layer = HeadWeights(layer.layer, layer.query * gains[0], layer.key * gains[1])
        span = in_span(layer.query, layer.key_by_query_head)
        rotations = {0: None} if rotary is None else {offset: rotary.matrix(offset) for offset in sorted(set(offsets))}
        by_offset = {offset: relations(*span, rotation) for offset, rotation in rotations.items()}
        for head in range(len(layer.query)):
            of_head = {offset: relations[head] for offset, relations in by_offset.items()}
            key_head = head // (len(layer.query) // len(layer.key))
            heads.append(HeadRelation(layer.layer, head, key_head, of_head))
    return heads


def in_span(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return R_Q and R_K of [W_Q W_K] = P [R_Q R_K]: ``(heads, min(hidden, 2 head sizes), head size)`` each."""
    _, r = torch.linalg.qr(torch.cat([query, key], dim=-1).double(), mode="r")
    first, second = r.chunk(2, dim=-1)
    return first, second


def relations(query: Tensor, key: Tensor, rotation: Tensor | None = None) -> list[Relation]:
    """Return the relation of each pair of matrices of :func:`in_span`; ``rotation`` is R(Δ), None the identity."""
    b = (query if rotation is None else query @ rotation) @ key.mT
    relations = []
    energies = b.pow(2).sum((-2, -1)).tolist()
    for energy, eigenvalues in zip(energies, torch.linalg.eigvalsh((b + b.mT) / 2), strict=True):
        squares, sizes = eigenvalues.pow(2), eigenvalues.abs()
        zero = ZERO * float(sizes.max())
        total = float(squares.sum())
        shares = sizes[sizes > zero] / sizes.sum()
        relation = Relation(
            norm=energy**0.5,
            symmetric=total / energy if energy else float("nan"),
            positive=int((eigenvalues > zero).sum()),
            negative=int((eigenvalues < -zero).sum()),
            positive_energy=float(squares[eigenvalues > 0].sum()) / total if total else float("nan"),
            effective_rank=float(torch.exp(-(shares * shares.log()).sum())) if total else 0.0,
        )
        relations.append(relation)
    return relations
