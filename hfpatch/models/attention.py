"""Faster attention on CPUs for models of transformers: by document in packed rows, by blocks without a mask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hfpatch.nn.attention import causal_attention
from hfpatch.support.cpu import active_library

_SDPA = "sdpa"
_SHORTEST, _SHORTEST_ALONE = 256, 512
"""Tokens from which on blocks are faster than torch's kernel: where heads share keys, and where they do not."""
_HAS_AMX = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
_DTYPES = (torch.float32,) if _HAS_AMX else (torch.float32, torch.bfloat16)
_Attention = Callable[..., tuple[Tensor, Tensor | None]]

_lock = threading.Lock()
_users = 0
_stock: _Attention | None = None  # what acts outside, the user's own if there is one


@contextmanager
def fast_attention() -> Iterator[None]:
    """Let transformers' SDPA attention on CPUs compute what is asked and not more, as long as this lasts.

    Attention under a mask computes a whole row of T tokens: T² products of queries and keys. Documents of n_1, n_2, ...
    tokens need half of n_1² + n_2² + ... and no mask. It acts where the mask says nothing but that (see
    `document_lengths`); elsewhere transformers' own function is called.

    Causal rows without a mask are computed in fp32, also in bf16 and under autocast: of documents of a hundred tokens
    and their gradients that takes a third of the time of torch's bf16 kernel. A processor with AMX, whose products in
    bf16 are far faster, keeps that kernel. Longer rows are computed in blocks by the faster library, where
    `hfpatch.fast_matmul` found one: torch's kernel computes whole squares of up to 512 keys and its products with MKL.
    Values agree to rounding.
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


def document_lengths(mask: Tensor) -> list[list[int]] | None:
    """Return the lengths of a batch's documents, if a mask is causal within documents that follow each other.

    Args:
        mask: (batch, 1, seq, seq), True where a query (a row) reads a key (a column).

    Returns:
        For every row of the batch the lengths, which add up to seq; None for any other mask.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    at = torch.arange(mask.shape[-1], device=mask.device)
    first = mask[:, 0].to(torch.uint8).argmax(-1)  # (batch, seq): the first key that a query reads
    starts = first == at
    goes_on = torch.nn.functional.pad(first[:, :-1], (1, 0)) == first
    causal = (at >= first[..., None]) & (at <= at[:, None])  # (batch, seq, seq)
    if not (bool((starts | goes_on).all()) and torch.equal(causal, mask[:, 0])):
        return None
    counts = [torch.bincount(row).tolist() for row in starts.cumsum(1) - 1]
    return counts


def _fast(stock: _Attention) -> _Attention:
    """Return an attention function of transformers' interface that divides its work by document and by block."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    last: tuple[Tensor | None, list[list[int]] | None] = (None, None)  # all layers are given the same mask

    def causal(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
        has_rows = mask is None and _is_plain(module, query, key, options)
        if not has_rows or stock is not sdpa_attention_forward or dtype not in _DTYPES:
            return stock(module, query, key, value, mask, **options)
        shortest = _SHORTEST if query.shape[1] > key.shape[1] else _SHORTEST_ALONE
        with torch.autocast("cpu", enabled=False):
            if query.shape[2] >= shortest and active_library() != "mkl":
                q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
                return causal_attention(q, k, v, options.get("scaling")).transpose(1, 2), None
            found, _ = stock(module, query.float(), key.float(), value.float(), None, **options)
            return found.to(dtype), None

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        nonlocal last
        lengths = None
        if (
            attention_mask is not None
            and query.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and len(attention_mask) == len(query)
            and query.shape[2] == key.shape[2]
            and all(options.get(name) is None for name in ("is_causal", "position_bias", "cache"))
        ):  # attention depends on the mask alone
            mask, lengths = last
            if mask is not attention_mask:
                lengths = document_lengths(attention_mask)
                last = (attention_mask, lengths)
        if lengths is None:
            return causal(module, query, key, value, attention_mask, **options)
        options["is_causal"] = True  # as the mask is, whatever the module says
        rows = []
        for row, sizes in enumerate(lengths):
            own = (states[row : row + 1] for states in (query, key, value))
            documents = zip(*(torch.split(states, sizes, 2) for states in own), strict=True)
            rows.append(torch.cat([causal(module, q, k, v, None, **options)[0] for q, k, v in documents], 1))
        return torch.cat(rows), None  # (batch, seq, heads, head size)

    return attention


def _is_plain(module: Any, query: Tensor, key: Tensor, options: dict[str, Any]) -> bool:
    """Return whether rows without a mask are causal, and have nothing that a model may add to their logits."""
    if torch.compiler.is_compiling() or query.device.type != "cpu" or query.shape[2] != key.shape[2]:
        return False
    causal = options.get("is_causal")
    return (
        not options.get("dropout")
        and all(options.get(name) is None for name in ("position_bias", "cache", "softcap"))
        and bool(getattr(module, "is_causal", True) if causal is None else causal)
    )
