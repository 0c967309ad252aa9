"""Faster attention on CPUs for models of transformers: by document in packed rows, by blocks without a mask."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hfpatch.nn.attention import bf16_attention, causal_attention
from hfpatch.nn.functions import autocast_dtype
from hfpatch.support.cpu import active_library

_SDPA = "sdpa"
_SHORTEST, _SHORTEST_ALONE = 256, 512
"""Tokens from which on blocks are faster than torch's kernel: where heads share keys, and where they do not."""
_FEWEST_LOGITS = 1 << 16
"""Logits from which on products in bf16 are faster than torch's kernel, for all heads and rows together."""
_HAS_AMX = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
_SHORTEST_WITH_AMX = 256
"""Tokens from which on the gradients of torch's bf16 kernel are as fast as those in fp32, with AMX."""
_Attention = Callable[..., tuple[Tensor, Tensor | None]]
_Layout = tuple[list[list[int]], int | None] | Tensor | None
"""What `read_mask` gives of a mask, or else `mask_to_add`."""

_lock = threading.Lock()
_users = 0
_stock: _Attention | None = None  # the function outside, the user's own if there is one


@contextmanager
def fast_attention() -> Iterator[None]:
    """Let transformers' SDPA attention on CPUs skip the pairs of tokens that a mask excludes, as long as this lasts.

    Attention under a mask computes a whole row of T tokens: T² products of queries and keys. Documents of n_1, n_2, ...
    tokens need half of n_1² + n_2² + ..., and with a window of w keys w (n_1 + n_2 + ...). It acts on masks of this
    kind (see `read_mask`); elsewhere transformers' own function is called.

    Causal rows without a mask are computed in fp32, also in bf16 and under autocast: of documents of a hundred tokens
    and their gradients that takes a third of the time of torch's bf16 kernel. With AMX, whose bf16 products are far
    faster, that takes two fifths, and the bf16 kernel computes longer rows and rows without gradients. Longer rows in
    fp32 are computed in blocks by the faster library, where `hfpatch.fast_matmul` found one: torch's kernel computes
    whole squares of up to 512 keys and its products with MKL. Values agree to rounding.

    A model in evaluation mode whose products `hfpatch.fast_matmul` computes in bf16 has them so in attention too: of a
    batch of 500 tokens, and of trees of endings (see `mask_to_add`), that takes half of the time of torch's kernels.
    With AMX it was not measured, and torch's bf16 kernel computes.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # imports scipy

    global _users, _stock
    with _lock:
        if _users == 0:
            _stock = ALL_ATTENTION_FUNCTIONS[_SDPA]
            ALL_ATTENTION_FUNCTIONS[_SDPA] = _fast(_stock)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                ALL_ATTENTION_FUNCTIONS[_SDPA] = _stock


def read_mask(mask: Tensor) -> tuple[list[list[int]], int | None] | None:
    """Return the lengths of a batch's documents and the window, if a mask is causal within documents one by one.

    Args:
        mask: (batch, 1, seq, seq), True where a query (a row) reads a key (a column).

    Returns:
        For every row of the batch the lengths, which add up to seq, and how many keys a query reads at most, its own
        included, where that is fewer than a document has; None for any other mask.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    at = torch.arange(mask.shape[-1], device=mask.device)
    first = mask[:, 0].to(torch.uint8).argmax(-1)  # (batch, seq): the first key that a query reads
    starts = first == at
    begin = torch.where(starts, at, 0).cummax(-1).values
    window = int((at - first).max()) + 1
    within = (at >= first[..., None]) & (at <= at[:, None])  # (batch, seq, seq)
    if not (torch.equal(first, torch.maximum(begin, at - window + 1)) and torch.equal(within, mask[:, 0])):
        return None
    lengths = [torch.bincount(row).tolist() for row in starts.cumsum(1) - 1]
    return lengths, window if window < max(map(max, lengths)) else None


def mask_to_add(mask: Tensor) -> Tensor | None:
    """Return what to add to logits for a mask under which each query reads its own key and none after it, as in a tree.

    Args:
        mask: (batch, 1, seq, seq), True where a query (a row) reads a key (a column).

    Returns:
        0 or -inf of the same shape in fp32; None for any other mask.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    if not mask.diagonal(dim1=2, dim2=3).all() or mask.triu(1).any():
        return None
    return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def _attend(
    stock: _Attention,
    is_sdpa: bool,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int | None,
    added: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention under any mask, one that is causal within the window, or one that reads as ``added`` to the logits."""
    autocast = autocast_dtype("cpu")
    dtype = autocast or query.dtype
    trains = torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value))
    # with nothing but the mask that a model may add to the logits
    is_causal = options.get("is_causal")
    is_known = (
        is_sdpa
        and not torch.compiler.is_compiling()
        and query.device.type == "cpu"
        and query.shape[2] == key.shape[2]
        and not options.get("dropout")
        and all(options.get(name) is None for name in ("position_bias", "cache", "softcap"))
        and (mask is not None or (getattr(module, "is_causal", True) if is_causal is None else is_causal))
    )
    in_bf16 = (
        query.dtype == torch.bfloat16
        and autocast is None
        and not (trains or module.training or _HAS_AMX)  # checkpointing repeats with gradients what it did without
        and active_library() == "bf16"
        and query.shape[:3].numel() * key.shape[2] >= _FEWEST_LOGITS
    )
    if in_bf16 and is_known and window is None and (mask is None or added is not None):
        return bf16_attention(query, key, value, options.get("scaling"), added).transpose(1, 2)
    in_fp32 = dtype == torch.float32
    if dtype == torch.bfloat16:
        in_fp32 = not _HAS_AMX or (trains and query.shape[2] < _SHORTEST_WITH_AMX)
    if in_fp32 and is_known and (mask is None or window is not None):
        shortest = _SHORTEST if query.shape[1] > key.shape[1] else _SHORTEST_ALONE
        with torch.autocast("cpu", enabled=False):
            if (query.shape[2] >= shortest or window is not None) and active_library() != "mkl":
                q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
                return causal_attention(q, k, v, options.get("scaling"), window).transpose(1, 2)
            output: Tensor = stock(module, query.float(), key.float(), value.float(), mask, **options)[0]
            return output.to(dtype)
    return stock(module, query, key, value, mask, **options)[0]


def _fast(stock: _Attention) -> _Attention:
    """Return an attention function of transformers' interface that divides its work by document and by block."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attend = partial(_attend, stock, stock is sdpa_attention_forward)
    layouts: deque[tuple[Tensor, _Layout]] = deque(maxlen=2)  # layers share masks

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if value.requires_grad and value.device.type == "cpu" and not torch.compiler.is_compiling():
            of_value, *others = (states.untyped_storage() for states in (value, query, key))
            if of_value.nbytes() > 2 * value.nbytes and all(
                of_value.data_ptr() != other.data_ptr() for other in others
            ):
                value = value.contiguous()  # its gradient would keep all of a fused projection's output
        layout: _Layout = None
        if (
            attention_mask is not None
            and query.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and len(attention_mask) == len(query)
            and query.shape[2] == key.shape[2]
            and all(options.get(name) is None for name in ("is_causal", "position_bias", "cache"))
        ):  # attention depends on the mask alone
            read = [layout for mask, layout in [*layouts] if mask is attention_mask]  # a copy: threads add theirs
            if not read:
                read.append(read_mask(attention_mask) or mask_to_add(attention_mask))
                layouts.append((attention_mask, read[0]))
            layout = read[0]
        if attention_mask is None or not isinstance(layout, tuple):
            added = layout if isinstance(layout, Tensor) else None
            return attend(module, query, key, value, attention_mask, None, added, **options), None
        lengths, window = layout
        options["is_causal"] = True  # as the mask is, whatever the module says
        rows = []
        for row, sizes in enumerate(lengths):
            parts = []
            for size, end in zip(sizes, accumulate(sizes), strict=True):
                at = slice(end - size, end)
                q, k, v = (states[row : row + 1, :, at] for states in (query, key, value))
                is_cut = window is not None and size > window
                mask = attention_mask[row : row + 1, :, at, at] if is_cut else None
                parts.append(attend(module, q, k, v, mask, window if is_cut else None, **options))
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows), None  # (batch, seq, heads, head size)

    return attention
