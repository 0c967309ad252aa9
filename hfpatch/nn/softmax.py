"""The softmax over a vocabulary that comes in slices, so that the logits of one slice are in memory at a time."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningSoftmax:
    """The largest logit m and s = Σ exp(z_v - m) of each row, over the tokens v so far.

    .. math::
        log Σ_v exp z_v = m + log s

    Where m grows, s and other sums weighted by exp(z_v - m) shrink in proportion.

    Args:
        rows: their number.
        device: of the logits.
        dtype: of s.
    """

    def __init__(self, rows: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.top = torch.full((rows,), torch.finfo(torch.float32).min, dtype=torch.float32, device=device)
        self.total = torch.zeros(rows, dtype=dtype, device=device)

    def add(self, logits: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        """Add a slice of logits ``(rows, tokens)`` in fp32, overwritten, whose largest is ``peak`` ``(rows,)``.

        Returns:
            exp(z - m) ``(rows, tokens)`` and the factor ``(rows,)`` by which sums over earlier slices shrink.
        """
        higher = torch.maximum(self.top, peak)
        shrink = (self.top - higher).to(self.total.dtype).exp_()
        shares = logits.sub_(higher[:, None]).exp_()
        self.total.mul_(shrink).add_(shares.sum(1, dtype=self.total.dtype))
        self.top = higher
        return shares, shrink

    @property
    def logsumexp(self) -> Tensor:
        """The logarithm of Σ exp z over the tokens so far, ``(rows,)``."""
        return self.top + self.total.log()
