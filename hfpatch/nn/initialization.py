"""Initialisation that depends on a seed and a name alone, never on what was initialised before."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator whose stream is a function of ``seed`` and ``name`` only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def normal_(tensor: Tensor, *, std: float, seed: int, name: str) -> Tensor:
    """Fill ``tensor`` in place with N(0, std²), drawn in fp32 on the CPU so that every device gets the same values.

    A tensor on the meta device is left as it is.
    """
    if tensor.device.type != "meta":
        values = torch.randn(tensor.shape, generator=seeded_generator(seed, name), dtype=torch.float32) * std
        tensor.copy_(values)
    return tensor


@torch.no_grad()
def uniform_(tensor: Tensor, *, bound: float, seed: int, name: str) -> Tensor:
    """Fill ``tensor`` in place with U(-bound, bound), drawn as :func:`normal_` draws.

    A tensor on the meta device is left as it is.
    """
    if tensor.device.type != "meta":
        values = torch.rand(tensor.shape, generator=seeded_generator(seed, name), dtype=torch.float32)
        tensor.copy_((2 * values - 1) * bound)
    return tensor


@torch.no_grad()
def move_(tensor: Tensor, *, bound: float, seed: int, name: str) -> Tensor:
    """Add U(-bound, bound) to ``tensor`` in place, drawn as :func:`normal_` draws."""
    if tensor.device.type != "meta":
        tensor += uniform_(torch.empty_like(tensor, device="cpu"), bound=bound, seed=seed, name=name).to(tensor)
    return tensor


def low_rank_(down: nn.Linear, up: nn.Linear, *, seed: int, name: str) -> None:
    """Initialise ``up(σ(down(x)))`` as LoRA is: down ~ U(-1/√d, 1/√d), up = 0, an exact no-op."""
    uniform_(down.weight, bound=down.in_features**-0.5, seed=seed, name=f"{name}_down")
    nn.init.zeros_(up.weight)
