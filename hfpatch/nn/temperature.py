"""A temperature for the query of each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class QueryTemperature(nn.Module):
    """Scales the query of each head.

    .. math::
        q_h <- q_h (1 + τ_h)                           τ: (heads,),  τ = 0 at init: an exact no-op

    The attention logits of head h are multiplied by 1 + τ_h, wherever rotary positions come in. It is the control for
    methods that change the size of the queries, such as the literal form (xW_Q + f(x))/2, which starts at half of it.
    Parameters: one a head.

    Args:
        heads: number of query heads.
    """

    def __init__(self, *, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self, query: Tensor, axis: int = -1) -> Tensor:
        """Scale queries, see :func:`scale_heads`."""
        return scale_heads(query, self.weight, axis)


def scale_heads(query: Tensor, tau: Tensor, axis: int = -1) -> Tensor:
    """Return q_h (1 + τ_h), computed in the dtype of τ at least and returned in that of ``query``.

    Args:
        query: ``(batch, seq, heads·size)``, or the heads along an axis of their own.
        tau: ``(heads,)``.
        axis: the axis of the heads; -1 where they share the last one.
    """
    factor = 1 + tau
    if axis == -1:
        by_head = torch.unflatten(query, -1, (len(tau), -1))  # (batch, seq, heads, size)
        return (by_head * factor[:, None]).to(query.dtype).reshape(query.shape)
    return (query * factor.reshape(-1, *[1] * (query.dim() - 1 - axis))).to(query.dtype)
