"""Does a model keep packed documents apart?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

_SHORT = 5
_SHORTEST_ROW = 12
_SHARE_OF_LEAK = {torch.float32: 1e-3, torch.float64: 1e-3}
_SHARE_OF_LEAK_LOW_PRECISION = 0.1


@torch.no_grad()
def packing_is_exact(model: PreTrainedModel, block_size: int) -> bool:
    """Run the model to see whether a packed row gives each document the features that it gets alone.

    Two rows of two random documents, a long one with a short one and two halves, go through the model alone, packed
    with position ids that restart, and packed with position ids that run on. The last shows how far apart the features
    are when the second document sees the first; packing is exact when restarting position ids remove all of that
    difference but rounding. Models that take no position ids (BLOOM) or take them for the embedding only fail, as do
    those whose rotary frequencies depend on the longest document of a batch (longrope).

    Args:
        model: a causal language model.
        block_size: tokens of a row, as they are trained on.
    """
    training = model.training
    model.eval()
    try:
        return _leaks_nothing(model, max(_SHORTEST_ROW, block_size))
    except (TypeError, ValueError):
        return False
    finally:
        model.train(training)


def _leaks_nothing(model: PreTrainedModel, size: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(model.config.get_text_config().vocab_size, (2, size), generator=generator).to(model.device)
    splits = [[size - _SHORT, _SHORT], [size // 2, size - size // 2]]
    restart = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in splits])
    running = torch.arange(size).expand(2, -1)
    alone = torch.cat([_alone(model, row[None], lengths) for row, lengths in zip(rows, splits, strict=True)])
    packed = (_features(model, rows, restart.to(model.device)) - alone).abs().max()
    leaked = (_features(model, rows, running.to(model.device)) - alone).abs().max()
    share = _SHARE_OF_LEAK.get(model.dtype, _SHARE_OF_LEAK_LOW_PRECISION)
    return bool(packed <= share * leaked)


def _alone(model: PreTrainedModel, row: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([_features(model, part, None) for part in torch.split(row, list(lengths), dim=1)], dim=1)


def _features(model: PreTrainedModel, ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the last hidden states (batch, seq, hidden); of a model without a head of its own, its logits."""
    positions = {} if position_ids is None else {"position_ids": position_ids}
    features: Tensor = model.base_model(input_ids=ids, use_cache=False, **positions)[0]
    return features.float()
