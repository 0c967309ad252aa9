"""The loss: the sum of the tokens' cross-entropies, from logits or, a few rows at a time, from hidden states."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from hfpatch.data.blocks import IGNORE
from hfpatch.nn.matmul import linear
from hfpatch.nn.softmax import RunningSoftmax
from hfpatch.sites.lm_head import PLAIN, Tail

_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
_FEWEST_ROWS = 64  # at once; each time the weights of the head are read again
_TILE = (512, 2048)  # rows, and tokens of the vocabulary: 4 MiB of logits stay in a processor's cache
_LIGER = "liger_kernel.transformers.functional"


def shifted(labels: Tensor) -> Tensor:
    """Return what each position predicts: ``(batch, seq)`` labels moved left by one, flat, the last ones ignored."""
    return pad(labels, (0, 1), value=IGNORE)[:, 1:].flatten()


def loss_from_logits(logits: Tensor, labels: Tensor, *, by_token: bool = False) -> Tensor:
    """Return the sum over predicted tokens of their cross-entropies in nats, from logits (batch, seq, vocab).

    ``labels`` are (batch, seq) token ids, unshifted; -100 is not predicted. With ``by_token`` return each position's
    cross-entropy (batch, seq) instead, 0 where nothing is predicted.
    """
    reduction = "none" if by_token else "sum"
    loss = cross_entropy(logits.flatten(0, 1).float(), shifted(labels), ignore_index=IGNORE, reduction=reduction)
    return loss.view(labels.shape) if by_token else loss


def loss_from_hidden(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, tail: Tail = PLAIN, by_token: bool = False
) -> Tensor:
    """Return what `loss_from_logits` would, with only a few rows' logits in memory at any time.

    Positions that predict nothing do not reach the head. The gradient is computed together with the loss, so no logits
    are kept for the backward pass. Liger's kernel does the work on CUDA where it is installed, else `ChunkedLoss`. The
    sum is float32 whatever the head's dtype; what is returned ``by_token`` has no gradient.

    The shapes are (batch, seq, hidden), of the head (vocab, hidden) and (vocab,), of the labels (batch, seq). ``tail``
    is what the model does between its head and its logits.
    """
    targets = shifted(labels)
    kept = (targets != IGNORE).nonzero().squeeze(1)
    rows, targets = hidden.flatten(0, 1)[kept], targets[kept]
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        if tail.scale != 1.0:
            rows, bias = rows * tail.scale, None if bias is None else bias * tail.scale
        size = chunk_rows(len(weight), rows.device)
        if by_token:
            losses = torch.zeros(labels.numel(), dtype=torch.float32, device=hidden.device)
            compute, step = (_tiles, _TILE[0]) if rows.device.type == "cpu" else (_chunk, size)
            with torch.no_grad():
                for start in range(0, len(rows), step):
                    part = slice(start, start + step)
                    losses[kept[part]] = compute(rows[part], weight, bias, targets[part], tail.cap, [False] * 3)[0]
            return losses.view(labels.shape)
        if len(rows) == 0:
            return (rows.sum() + 0.0 * weight.sum()).float()
        liger = _liger() if rows.is_cuda else None
        if liger is not None:
            loss: Tensor = liger(rows, weight, targets, bias=bias, reduction="sum", softcap=tail.cap)
            return loss
        loss = ChunkedLoss.apply(rows, weight, bias, targets, tail.cap, size)  # type: ignore[no-untyped-call]  # torch has no type
        return loss


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Return how many rows of logits are computed at once: a power of two, some 32 MiB on CPUs and 256 on GPUs."""
    fitting = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"]) // (4 * vocabulary)
    return max(_FEWEST_ROWS, 1 << max(0, fitting.bit_length() - 1))


class ChunkedLoss(torch.autograd.Function):
    """The summed cross-entropy of ``rows @ weight.T + bias``, a few rows at a time; gradients in the forward pass.

    On CPUs a frozen head is also taken a slice of the vocabulary at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None, size: int
    ) -> Tensor:
        """Compute the loss and, chunk by chunk, what it owes to each input that needs a gradient."""
        inputs = (rows, weight, bias)
        wide = torch.promote_types(rows.dtype, torch.float32)  # a sum over chunks in bf16 would be rounded each time
        gradients = [
            torch.zeros_like(value, dtype=wide) if value is not None and needed else None
            for value, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        tiled = rows.device.type == "cpu" and not any(ctx.needs_input_grad[1:3])
        compute, step = (_tiles, _TILE[0]) if tiled else (_chunk, size)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            loss, owed = compute(rows[part], weight, bias, targets[part], cap, [g is not None for g in gradients])
            total += loss.sum()
            targets_of = [gradients[0] if gradients[0] is None else gradients[0][part], *gradients[1:]]
            for gradient, value in zip(targets_of, owed, strict=True):
                if gradient is not None and value is not None:
                    gradient += value
        ctx.gradients, ctx.dtype = gradients, rows.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass computed."""
        scaled = [None if gradient is None else (gradient * outer[0]).to(ctx.dtype) for gradient in ctx.gradients]
        return (*scaled, None, None, None)


def _chunk(
    rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None, wanted: list[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the losses (rows,) of one chunk and the gradients of their sum by rows, weight and bias where wanted.

    .. math::
        loss_i = log(sum_v exp z_iv) - z_i,target      d loss_i / d z_i = softmax(z_i) - onehot(target)

    On CPUs one buffer of (rows, vocab) goes from logits to their gradient: allocating another costs as much as filling
    it. On GPUs the softmax reads logits in half precision and writes float32, without a copy in between.
    """
    logits = linear(rows, weight, bias)  # (rows, vocab)
    on_cpu, squashed = logits.device.type == "cpu", None
    if on_cpu or cap is not None:
        logits = logits.float()
    if cap is not None:
        squashed = torch.tanh(logits / cap)
        logits = squashed * cap
    at = targets[:, None]
    scores, top = logits.gather(1, at).float(), logits.amax(1, keepdim=True).float()
    shares = torch.softmax(logits, -1, dtype=torch.float32, out=logits if on_cpu else None)
    logsumexp = top - shares.amax(1, keepdim=True).log()  # as the largest share is exp(top - logsumexp)
    loss = (logsumexp - scores).squeeze(1)
    if not any(wanted):
        return loss, [None] * len(wanted)
    by_logits = shares.scatter_add_(1, at, torch.full_like(scores, -1.0))
    if squashed is not None:
        by_logits *= 1 - squashed.square_()
    g = by_logits.to(rows.dtype)
    return loss, [
        linear(g, weight.t()) if wanted[0] else None,
        linear(g.t(), rows.t()) if wanted[1] else None,
        g.sum(0) if wanted[2] else None,
    ]


def _tiles(
    rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None, wanted: list[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return what `_chunk` does for a frozen head, from one slice of the vocabulary after the other.

    With m_i and s_i of `RunningSoftmax` and w_v the head's row of token v:

    .. math::
        a_i = sum_v exp(z_iv - m_i) w_v
        loss_i = m_i + log s_i - z_i,target                d loss_i / d x_i = a_i / s_i - w_target

    A soft cap multiplies each w by its derivative, 1 - tanh^2.
    """
    softmax = RunningSoftmax(len(rows), rows.device)
    scores = torch.zeros_like(softmax.top[:, None])
    slope = torch.ones_like(scores)
    mean = torch.zeros_like(rows, dtype=torch.float32)  # of the head's rows, times the total
    for start in range(0, len(weight), _TILE[1]):
        part = weight[start : start + _TILE[1]]
        z = linear(rows, part, None if bias is None else bias[start : start + _TILE[1]]).float()  # (rows, tokens)
        squashed = None
        if cap is not None:
            squashed = torch.tanh(z / cap)
            z = squashed * cap
        at = (targets - start)[:, None]
        here = (at >= 0) & (at < len(part))
        at = at.clamp(0, len(part) - 1)
        scores = torch.where(here, z.gather(1, at), scores)
        shares, shrink = softmax.add(z, z.amax(1))
        if wanted[0]:
            if squashed is not None:
                by_cap = 1 - squashed.square_()
                slope = torch.where(here, by_cap.gather(1, at), slope)
                shares *= by_cap
            mean.mul_(shrink[:, None]).add_(linear(shares.to(rows.dtype), part.t()))
    loss = softmax.logsumexp - scores.squeeze(1)
    by_rows = (mean / softmax.total[:, None] - slope * weight[targets]).to(rows.dtype) if wanted[0] else None
    return loss, [by_rows, None, None]


def _liger() -> Any:
    """Return Liger's fused loss, or None where it is not installed."""
    try:
        return importlib.import_module(_LIGER).liger_fused_linear_cross_entropy
    except ImportError:
        return None
