"""Causal attention on the CPU, in blocks of products by whichever library is faster here, or in bf16."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hfpatch.nn.matmul import linear

_QUERIES = 128  # of each head in a block; those of heads that share keys are in one product
_MANY_HEADS = 4  # that share keys: blocks of half as many
_KEYS = 1024  # in a tile; a multiple of a block's queries
_LONG_ENOUGH = 96  # queries that are faster in two blocks, in `bf16_attention`
_LOGITS = 1 << 19  # at once in `bf16_attention`: 2 MiB in fp32, as much as a cache holds


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Return softmax(scale · Q Kᵀ) V, each query with the keys up to its own; blocks beyond them are not computed.

    All of it is computed in fp32, under autocast too; of bf16 the result and the gradients are rounded. No weights are
    kept for the gradients: they are computed again from L, the logarithm of the sum of each query's exponentials (Dao
    et al., 2022, arXiv 2205.14135). With P = exp(scale · Q Kᵀ - L) and the gradient G of the result O:

    .. math::
        dV = Pᵀ G        dS = P ⊙ (G Vᵀ - (G ⊙ O) 1)        dQ = scale dS K        dK = scale dSᵀ Q

    Args:
        query: (batch, heads, seq, width), fp32 or bf16.
        key: (batch, groups, seq, width); the heads are shared out among the groups in their order.
        value: (batch, groups, seq, width of the values).
        scale: of the logits; None takes width^-0.5.
        window: how many keys a query reads, its own included; None is all.

    Returns:
        (batch, heads, seq, width of the values), in the dtype of the query.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        result = _CausalAttention.apply(query, key, value, scale, window or key.shape[2])  # type: ignore[no-untyped-call]  # torch has no type for it
    return cast("Tensor", result)


def bf16_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return softmax(scale · Q Kᵀ + M) V with products in bf16, without gradients; M is causal, or a mask.

    A product in bf16 is summed in fp32 and then rounded. torch's kernels do not round the logits, so they are computed
    in two parts here, the rounded logits and what the rounding left, which together have twice the digits:

    .. math::
        H = bf16(scale · Q Kᵀ)        R = bf16(scale · Q Kᵀ - H)        P = bf16(softmax(H + R + M))

    Many heads and rows are in one product, each with some of its queries and the keys up to the last of them. Both
    parts, and blocks of short rows, are one shape of product: oneDNN keeps half a MiB for each shape.

    Args:
        query: (batch, heads, seq, width), bf16.
        key: (batch, groups, seq, width); the heads are shared out among the groups in their order.
        value: (batch, groups, seq, width of the values).
        scale: of the logits; None takes width^-0.5.
        mask: (batch, 1, seq, seq) in fp32, 0 where a query reads a key, -inf where not. Each query reads a key, and
            none after its own. None is all up to its own.

    Returns:
        (batch, heads, seq, width of the values), bf16.
    """
    (batch, heads, length, width), groups = query.shape, key.shape[1]
    scale, shared = width**-0.5 if scale is None else scale, heads // groups
    key, value = key.transpose(2, 3).contiguous(), value.contiguous()
    out = query.new_empty(batch, length, heads, value.shape[-1])
    size = math.ceil(length / max(math.ceil(length / _QUERIES), 2 if length >= _LONG_ENOUGH else 1))
    beyond = torch.full((size, size), -torch.inf).triu_(1)
    for start in range(0, length, size):
        stop = min(start + size, length)
        n = stop - start
        for rows, some in _parts(batch, groups, max(1, _LOGITS // (shared * n * stop))):
            at = slice(some.start * shared, some.stop * shared)
            queries = query[rows, at, start:stop].reshape(-1, shared * n, width)
            keys, values = key[rows, some, :, :stop].flatten(0, 1), value[rows, some, :stop].flatten(0, 1)
            part = queries.new_zeros(len(queries), shared * n, stop)
            high = part.baddbmm_(queries, keys, beta=-1, alpha=scale).float()
            weights = high.add_(part.baddbmm_(queries, keys, beta=-1, alpha=scale))
            logits = weights.view(-1, at.stop - at.start, n, stop)
            if mask is None:
                logits[..., start:].add_(beyond[:n, :n])
            else:
                logits.add_(mask[rows, :, start:stop, :stop])
            torch.softmax(weights, -1, out=weights)
            attended = torch.bmm(weights.to(query.dtype), values)
            out[rows, start:stop, at] = attended.view(*logits.shape[:3], -1).transpose(1, 2)
    return out.transpose(1, 2)


def _parts(batch: int, groups: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and groups, at most so many together: all groups of some rows, or some groups of one."""
    step = min(most, groups)
    for row in range(0, batch, most // step):
        for group in range(0, groups, step):
            yield slice(row, row + most // step), slice(group, min(group + step, groups))


class _CausalAttention(torch.autograd.Function):
    """The forward pass goes over the tiles of keys of a block of queries, with l the logarithm of a tile's sum.

    .. math::
        L = log(e^L + e^l)                out = e^(L_before - L) out + e^(l - L) softmax(tile) V
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        q, k, v = query.float(), key.float(), value.float()
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = q.new_empty(query.shape[:-1])  # their logarithms L, (batch, heads, seq)
        for heads, group, block in _blocks(query, key):
            queries, keys, values = q[heads][:, block] * scale, k[group], v[group].t()
            rows = queries.flatten(0, 1)
            attended = total = None
            for tile in _tiles(block, window):
                weights = _logits(rows, keys, tile, block, window)
                top = weights.amax(1, keepdim=True)
                torch.softmax(weights, -1, out=weights)
                part = top - weights.amax(1, keepdim=True).log_()  # as the largest weight is exp(top - l)
                mean = linear(weights, values[:, tile])
                if attended is None or total is None:
                    attended, total = mean, part
                else:
                    both = torch.logaddexp(total, part)
                    attended.mul_((total - both).exp_()).addcmul_(mean, (part - both).exp_())
                    total = both
            assert attended is not None
            assert total is not None
            out[heads][:, block] = attended.view(*queries.shape[:2], -1)
            sums[heads][:, block] = total.view(queries.shape[:2])
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.scale, ctx.window = scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False):
            grad, query, key, value, out, sums = (tensor.float() for tensor in (*outer, *ctx.saved_tensors))
            means = (grad * out).sum(-1)  # (G ⊙ O) 1, (batch, heads, seq)
            by_query, by_key, by_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
            for heads, group, block in _blocks(query, key):
                queries, keys, values = query[heads][:, block], key[group], value[group]
                rows, by_out = queries.flatten(0, 1) * ctx.scale, grad[heads][:, block].flatten(0, 1)
                total, mean = (tensor[heads][:, block].reshape(-1, 1) for tensor in (sums, means))
                gradient = torch.zeros_like(rows)
                for tile in _tiles(block, ctx.window):
                    weights = _logits(rows, keys, tile, block, ctx.window).sub_(total).exp_()
                    by_value[group][tile] += linear(weights.t(), by_out.t())
                    weights.mul_(linear(by_out, values[tile]).sub_(mean))  # dS
                    gradient += linear(weights, keys[tile].t())
                    by_key[group][tile] += linear(weights.t(), rows.t())
                by_query[heads][:, block] = gradient.mul_(ctx.scale).view_as(queries)
        return *(tensor.to(outer[0].dtype) for tensor in (by_query, by_key, by_value)), None, None


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[tuple[int, slice], tuple[int, int], slice]]:
    """Yield the index of the heads that share keys, that of their keys, and the positions of some of their queries."""
    shared, length = query.shape[1] // key.shape[1], query.shape[2]
    size = _QUERIES if shared <= _MANY_HEADS else _QUERIES // 2
    for row, group in itertools.product(range(query.shape[0]), range(key.shape[1])):
        for start in range(0, length, size):
            heads = slice(group * shared, (group + 1) * shared)
            yield (row, heads), (row, group), slice(start, min(length, start + size))


def _tiles(block: slice, window: int) -> Iterator[slice]:
    """Yield the positions of the keys that a block's queries read; each query reads some in every tile."""
    start = max(0, (block.start - window + 1) // _QUERIES * _QUERIES)  # so that no tile begins within a block
    return (slice(first, min(block.stop, first + _KEYS)) for first in range(start, block.stop, _KEYS))


def _logits(rows: Tensor, keys: Tensor, tile: slice, block: slice, window: int) -> Tensor:
    """Return the logits (rows, keys of the tile), -inf where a query does not read a key."""
    logits = linear(rows, keys[tile])
    n, m = block.stop - block.start, tile.stop - tile.start
    if tile.stop == block.stop:
        logits.view(-1, n, m)[..., -n:].add_(logits.new_full((n, n), -torch.inf).triu_(1))
    if tile.start < block.stop - window:
        before = torch.ones(n, m, dtype=torch.bool).tril_(block.start - window - tile.start)
        logits.view(-1, n, m).masked_fill_(before, -torch.inf)
    return logits
