"""Parameter counts as papers on pretraining give them."""

from __future__ import annotations

from typing import Any

from torch import nn


def non_embedding_parameters(model: Any) -> int:
    """Return the number of parameters outside the embeddings of tokens and positions and an output head."""
    head = model.get_output_embeddings()
    outside = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    left_out = {id(parameter) for module in outside for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in left_out)
