"""Matrices with orthonormal rows."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from hfpatch.nn.initialization import normal_


def orthonormal_rows(matrix: Tensor) -> Tensor:
    """Return R = L⁻¹ M ``(r, d)``, where M Mᵀ = L Lᵀ (Cholesky): orthonormal rows that span those of M.

    It is M itself, up to rounding, where the rows of M are orthonormal. Computed in fp32 at least, also under autocast.

    Args:
        matrix: M ``(r, d)`` of rank r.
    """
    kind = matrix.device.type
    plain = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
    with plain:
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        factor, _ = torch.linalg.cholesky_ex(wide @ wide.mT)  # which, unlike cholesky, does not wait for a GPU
        rows: Tensor = torch.linalg.solve_triangular(factor, wide, upper=False)
    return rows.to(matrix.dtype)


@torch.no_grad()
def orthonormal_(tensor: Tensor, *, seed: int, name: str) -> Tensor:
    """Fill ``tensor`` ``(r, d)`` in place with random orthonormal rows, drawn and computed in fp32 on the CPU.

    A tensor on the meta device is left as it is.
    """
    if tensor.device.type != "meta":
        drawn = normal_(torch.empty(tensor.shape, device="cpu", dtype=torch.float32), std=1.0, seed=seed, name=name)
        tensor.copy_(torch.linalg.qr(drawn.mT)[0].mT)
    return tensor
