"""Initialisation that depends on a seed and a name alone, and matrices with orthonormal rows."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext

import torch
from torch import Tensor, nn


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator whose stream is a function of ``seed`` and ``name`` only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def normal_(tensor: Tensor, *, std: float, seed: int, name: str) -> Tensor:
    """Fill ``tensor`` in place with N(0, std²), drawn in fp32 on the CPU so that every device gets the same values.

    A tensor on the meta device is left unchanged.
    """
    if tensor.device.type != "meta":
        drawn = torch.randn(tensor.shape, generator=seeded_generator(seed, name), dtype=torch.float32, device="cpu")
        tensor.copy_(drawn * std)
    return tensor


@torch.no_grad()
def uniform_(tensor: Tensor, *, bound: float, seed: int, name: str) -> Tensor:
    """Fill ``tensor`` in place with U(-bound, bound), drawn as :func:`normal_` draws.

    A tensor on the meta device is left unchanged.
    """
    if tensor.device.type != "meta":
        values = torch.rand(tensor.shape, generator=seeded_generator(seed, name), dtype=torch.float32, device="cpu")
        tensor.copy_((2 * values - 1) * bound)
    return tensor


def low_rank_(down: nn.Linear, up: nn.Linear, *, seed: int, name: str) -> None:
    """Initialise ``up(σ(down(x)))`` as LoRA is: down ~ U(-1/√d, 1/√d), up = 0, an exact no-op."""
    uniform_(down.weight, bound=down.in_features**-0.5, seed=seed, name=f"{name}_down")
    nn.init.zeros_(up.weight)


def orthonormal_rows(matrix: Tensor) -> Tensor:
    """Return R = L⁻¹ M ``(r, d)``, where M Mᵀ = L Lᵀ (Cholesky): orthonormal rows that span those of M.

    It is M itself, up to rounding, where the rows of M are orthonormal. Computed in fp32 at least, also under autocast.

    Args:
        matrix: M ``(r, d)`` of rank r.
    """
    kind = matrix.device.type
    plain = nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
    with plain:
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        factor, _ = torch.linalg.cholesky_ex(wide @ wide.mT)  # which, unlike cholesky, does not wait for a GPU
        rows: Tensor = torch.linalg.solve_triangular(factor, wide, upper=False)
    return rows.to(matrix.dtype)


@torch.no_grad()
def orthonormal_(tensor: Tensor, *, seed: int, name: str) -> Tensor:
    """Fill ``tensor`` ``(r, d)`` in place with random orthonormal rows, drawn and computed in fp32 on the CPU.

    A tensor on the meta device is left unchanged.
    """
    if tensor.device.type != "meta":
        drawn = normal_(torch.empty(tensor.shape, device="cpu", dtype=torch.float32), std=1.0, seed=seed, name=name)
        tensor.copy_(torch.linalg.qr(drawn.mT)[0].mT)
    return tensor
