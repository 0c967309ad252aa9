"""A short causal convolution of each column of the hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    r"""Adds to every position a weighted sum of itself and the positions before it.

    .. math::
        y_t = x_t + Σ_{j < n} w_j ⊙ x_{t-j}            w: (n, size),  w = 0 at init: an exact no-op

    Parameters: n·size. Sources: Canon layers, *Physics of Language Models: Part 4.1* (Allen-Zhu, 2025); the depthwise
    convolution of Primer, arXiv 2109.08668, which acts behind query, key and value and has no residual.

    Args:
        size: number of columns.
        width: n, how many positions are added, the own one included.
    """

    def __init__(self, *, size: int, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, size))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, seq, size)`` to the same shape; zeros are before the start."""
        steps = range(1, len(self.weight))
        earlier = [F.pad(x, (0, 0, step, 0))[:, : x.shape[1]] for step in steps]
        return short_convolution(x, earlier, self.weight)


def short_convolution(x: Tensor, earlier: Sequence[Tensor], weight: Tensor) -> Tensor:
    """Return y ``(batch, seq, size)``, see :class:`ShortConvolution`.

    Args:
        x: ``(batch, seq, size)``.
        earlier: x at 1, 2, ... positions earlier, one fewer than there are weights.
        weight: ``(width, size)``.
    """
    y = x + weight[0] * x
    for factor, before in zip(weight[1:], earlier, strict=True):
        y = y + factor * before
    return y
