"""Causal attention on the CPU, in blocks of products by whichever library is faster here; without gradients."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hfpatch.nn.matmul import linear

_QUERIES = 128  # of each head in a block; those of heads that share keys are in one product
_MANY_HEADS = 4  # that share keys: blocks of half as many
_KEYS = 1024  # a multiple of a block's queries


@torch.no_grad()
def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax(scale · Q Kᵀ) V, each query with the keys up to its own; what lies beyond is not computed.

    All of it is computed in fp32; of bf16 the result is rounded.

    Args:
        query: (batch, heads, seq, width), fp32 or bf16.
        key: (batch, groups, seq, width); the heads are shared out among the groups in their order.
        value: (batch, groups, seq, width of the values).
        scale: of the logits; None takes width^-0.5.

    Returns:
        (batch, heads, seq, width of the values), in the dtype of the query.
    """
    batch, heads, length, width = query.shape
    shared = heads // key.shape[1]
    size = _QUERIES if shared <= _MANY_HEADS else _QUERIES // 2
    beyond = query.new_full((size, size), -torch.inf, dtype=torch.float32).triu(1)
    found = query.new_empty(batch, heads, length, value.shape[-1])
    for row, group in itertools.product(range(batch), range(key.shape[1])):
        own = slice(group * shared, (group + 1) * shared)
        queries = query[row, own].float() * (width**-0.5 if scale is None else scale)
        keys, values = key[row, group].float(), value[row, group].float().t()
        for start in range(0, length, size):
            end = min(length, start + size)
            found[row, own, start:end] = _block(queries[:, start:end], keys[:end], values[:, :end], beyond)
    return found


def _block(queries: Tensor, keys: Tensor, values: Tensor, beyond: Tensor) -> Tensor:
    """Return the attention (heads, n, width of the values) of queries (heads, n, width) on keys (m, width).

    The last n keys are the queries' own. Over the tiles of keys so far, with l the logarithm of a tile's sum:

    .. math::
        L = log(e^L + e^l)                out = e^(L_before - L) out + e^(l - L) softmax(tile) V
    """
    heads, n, width = queries.shape
    rows = queries.reshape(-1, width)
    out = sums = None
    for first in range(0, len(keys), _KEYS):
        tile = slice(first, first + _KEYS)
        weights = linear(rows, keys[tile])  # logits so far, (heads * n, keys of the tile)
        if first + _KEYS >= len(keys):
            weights.view(heads, n, -1)[..., -n:].add_(beyond[:n, :n])
        top = weights.amax(1, keepdim=True)
        torch.softmax(weights, -1, out=weights)
        own = top - weights.amax(1, keepdim=True).log_()  # as the largest weight is exp(top - log of the sum)
        mean = linear(weights, values[:, tile])
        if out is None or sums is None:
            out, sums = mean, own
        else:
            both = torch.logaddexp(sums, own)
            out.mul_((sums - both).exp_()).addcmul_(mean, (own - both).exp_())
            sums = both
    assert out is not None
    return out.view(heads, n, -1)
