"""Packing several documents in a row, and whether a model keeps packed documents separate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.data.tokenizer import Integers
from hfpatch.support.modes import evaluating, replaced

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 1 << 16  # pieces at once as numbers of Python
_SHORT = 5  # tokens of a probe's short document
_SHORTEST_ROW, _ENOUGH = 12, 64  # tokens of a probe's row: two documents fit, and crossing shows in short rows
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # whose frequencies do not depend on the length of the input
_SHARE_OF_LEAK = {torch.float32: 1e-3, torch.float64: 1e-3}  # that rounding may cause
_SHARE_OF_LEAK_LOW_PRECISION = 0.1  # in bf16 and fp16, which round more coarsely
_TIMES_NOISE = 4  # a larger change by packing is not explained by the change of a text's batch
_INT8 = "Int8Params"
_CROSSING = "attention crosses from one to the next"
_HIDDEN = (
    "a text's features depend on the rest of its batch, as with quantised inputs, and that hides whether attention "
    "crosses from one to the next"
)


def split_pieces(begins: Integers, lengths: Integers, block_size: int, added: int = 0) -> Integers:
    """Cut documents into pieces for rows of ``block_size`` tokens; those of a single token are left out.

    ``begins`` and ``lengths`` (documents,) are the start of each in a flat array of tokens and its tokens. Before each
    piece but the first of a document go ``added`` tokens, for which its row needs space.

    Returns (pieces, 3): the start of each, its tokens without the added ones, and how many are added.
    """
    later = block_size - added
    counts = 1 + np.maximum(-(-(lengths - block_size) // later), 0)
    documents = np.repeat(np.arange(len(lengths)), counts)
    rank = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.where(rank == 0, 0, block_size + (rank - 1) * later)
    sizes = np.minimum(lengths[documents] - offsets, np.where(rank == 0, block_size, later))
    pieces = np.stack([begins[documents] + offsets, sizes, np.where(rank == 0, 0, added)], axis=1)
    return pieces[sizes > 1]


def pack(sizes: Integers, block_size: int) -> tuple[Integers, Integers]:
    """Put pieces into rows of ``block_size`` by best fit, the longest first; no piece is cut.

    Each piece goes to the row with the least space in which it fits, or to a new row. One integer, used as a set of the
    spaces that some row has, finds that row in constant time. Memory use is a few dozen bytes per piece.

    Returns, for ``sizes`` (pieces,) in tokens, (pieces,) the indices of the pieces, row by row, and (rows + 1,) where
    each row begins among them.
    """
    by_space: list[list[int]] = [[] for _ in range(block_size + 1)]
    spaces, count = 0, 0
    longest_first = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    for start in range(0, len(sizes), _CHUNK):
        chosen = longest_first[start : start + _CHUNK]
        for index, size in enumerate(sizes[chosen].tolist(), start):
            fitting = spaces >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                row = by_space[space].pop()
                spaces ^= 0 if by_space[space] else 1 << space
            else:
                space, row, count = block_size, count, count + 1
            row_of[index] = row
            if space > size:
                by_space[space - size].append(row)
                spaces |= 1 << (space - size)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))]).astype(np.int64)
    return longest_first[np.argsort(row_of, kind="stable")], offsets


@torch.no_grad()
def packing_obstacle(model: PreTrainedModel, block_size: int) -> str | None:
    """Run the model to test whether each document has the same features in a packed row as when run separately.

    Two rows of two random documents, a long one with a short one and two halves, go through the model separately,
    packed with position ids that restart, and packed with position ids that continue. The last shows the difference if
    the second document attends to the first; packing is exact if restarting position ids remove all of that difference
    except rounding. Models without position ids (BLOOM) or with position ids in the embedding only fail, and models
    whose rotary frequencies depend on the longest document of a batch (longrope).

    LLM.int8 rounds a layer's input by columns that it chooses over the whole batch, so a text has other features in
    another batch. For the test such layers compute with dequantised weights and unrounded inputs. If a text still
    depends on its batch as much as on packing, the test is inconclusive.

    Returns why the model cannot keep the documents of packed rows of ``block_size`` tokens apart, or None if it can.
    Shorter rows are tried where they show as much.
    """
    try:
        with evaluating(model), _inputs_unrounded(model):
            # A short row, or a whole block where frequencies may depend on the input's length.
            config = model.config.get_text_config()
            ropes = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
            types = {kind for rope in ropes if isinstance(rope, dict) for kind in _rope_types(rope)}
            size = max(_SHORTEST_ROW, min(block_size, _ENOUGH) if types <= _FIXED_ROPE else block_size)

            # The documents alone, packed with restarting and packed with running position ids.
            generator = torch.Generator().manual_seed(0)
            rows, others = torch.randint(config.vocab_size, (2, 2, size), generator=generator).to(model.device)
            splits = [[size - _SHORT, _SHORT], [size // 2, size - size // 2]]
            documents = [torch.split(row[None], lengths, dim=1) for row, lengths in zip(rows, splits, strict=True)]
            alone = torch.cat(
                [torch.cat([_features(model, part, None) for part in parts], dim=1) for parts in documents]
            )
            restart = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in splits])
            running = torch.arange(size).expand(2, -1)
            packed = (_features(model, rows, restart.to(model.device)) - alone).abs().max()
            leaked = (_features(model, rows, running.to(model.device)) - alone).abs().max()
            share = _SHARE_OF_LEAK.get(model.dtype, _SHARE_OF_LEAK_LOW_PRECISION)
            if packed <= share * leaked:
                return None

            # The longest document in another batch: whether that changes it as much.
            longest = documents[0][0]
            accompanied = _features(model, torch.cat([longest, others[:1, : longest.shape[1]]]), None)[0]
            noise = (accompanied - alone[0, : longest.shape[1]]).abs().max()
            return _HIDDEN if packed <= _TIMES_NOISE * noise else _CROSSING
    except (TypeError, ValueError):
        return _CROSSING


def _rope_types(rope: dict[str, Any]) -> Iterator[str]:
    """Yield the types of rotary embeddings in a configuration, which may have one for each type of layer."""
    if "rope_type" in rope or "type" in rope:
        yield str(rope.get("rope_type", rope.get("type")))
    for value in rope.values():
        if isinstance(value, dict):
            yield from _rope_types(value)


@contextmanager
def _inputs_unrounded(model: PreTrainedModel) -> Iterator[None]:
    """Let 8-bit layers of bitsandbytes multiply their inputs as they are, in place of rounding them to 8 bits."""

    def by_dequantised_weight(module: Any, x: Tensor) -> Tensor:
        from transformers.integrations.bitsandbytes import dequantize_bnb_weight

        weight = dequantize_bnb_weight(module.weight, module.state).to(x.dtype)
        return F.linear(x, weight, None if module.bias is None else module.bias.to(x.dtype))

    modules: list[Any] = [part for part in model.modules() if type(part._parameters.get("weight")).__name__ == _INT8]
    with ExitStack() as stack:
        for module in (module for module in modules if "forward" not in vars(module)):
            stack.enter_context(replaced(module, forward=partial(by_dequantised_weight, module)))
        yield


def _features(model: PreTrainedModel, ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the last hidden states (batch, seq, hidden); for a model without a separate head, its logits."""
    positions = {} if position_ids is None else {"position_ids": position_ids}
    features: Tensor = model.base_model(input_ids=ids, use_cache=False, **positions)[0]
    return features.float()
