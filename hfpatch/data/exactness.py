"""Does a model keep packed documents apart?"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

_LENGTHS = [7, 5]
_SHARE_OF_LEAK = {torch.float32: 1e-3, torch.float64: 1e-3}
_SHARE_OF_LEAK_LOW_PRECISION = 0.1


@torch.no_grad()
def packing_is_exact(model: PreTrainedModel) -> bool:
    """Run the model to see whether a packed row gives each document the logits that it gets alone.

    Two random documents go through the model alone, packed with position ids that restart, and packed with position
    ids that run on. The last shows how far apart the logits are when the second document sees the first; packing is
    exact when restarting position ids remove all of that difference but rounding. Models that take no position ids
    (BLOOM) or take them for the embedding only fail.
    """
    training = model.training
    model.eval()
    try:
        return _leaks_nothing(model)
    except (TypeError, ValueError):
        return False
    finally:
        model.train(training)


def _leaks_nothing(model: PreTrainedModel) -> bool:
    generator = torch.Generator().manual_seed(0)
    size = sum(_LENGTHS)
    row = torch.randint(model.config.get_text_config().vocab_size, (1, size), generator=generator).to(model.device)
    restart = torch.cat([torch.arange(length) for length in _LENGTHS])[None].to(model.device)
    running = torch.arange(size)[None].to(model.device)
    alone = torch.cat([_logits(model, part, None) for part in torch.split(row, _LENGTHS, dim=1)], dim=1)
    packed = (_logits(model, row, restart) - alone).abs().max()
    leaked = (_logits(model, row, running) - alone).abs().max()
    share = _SHARE_OF_LEAK.get(model.dtype, _SHARE_OF_LEAK_LOW_PRECISION)
    return bool(packed <= share * leaked)


def _logits(model: PreTrainedModel, ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    positions = {} if position_ids is None else {"position_ids": position_ids}
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **positions).logits
    return logits.float()
