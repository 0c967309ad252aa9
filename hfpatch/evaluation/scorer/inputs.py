"""Rows of tokens as the arguments of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hfpatch.evaluation.scorer.grouping import Tree


def model_inputs(model: Any, trees: Sequence[Tree]) -> dict[str, Tensor]:
    """Return the arguments for a batch of rows, padded on the right.

    Plain rows need nothing but their tokens: causal attention lets no token see the padding. Trees need position ids
    (batch, seq) and a mask (batch, 1, seq, seq) that lets each token see its ancestors and itself.
    """
    longest = max(len(tree) for tree in trees)
    tokens = torch.tensor([tree.tokens + [0] * (longest - len(tree)) for tree in trees], device=model.device)
    if all(tree.is_chain for tree in trees):
        return {"tokens": tokens}
    positions = torch.tensor([tree.depths + [0] * (longest - len(tree)) for tree in trees], device=model.device)
    seen = torch.from_numpy(np.stack([visible(tree, longest) for tree in trees])[:, None]).to(model.device)
    return {"tokens": tokens, "position_ids": positions, "attention_mask": _as_mask(model, seen)}


def visible(tree: Tree, longest: int) -> NDArray[np.bool_]:
    """Return what each token of a tree may see, (longest, longest); padding sees itself."""
    seen = np.eye(longest, dtype=bool)
    chain = next((node for node, parent in enumerate(tree.parents) if parent != node - 1), len(tree))
    seen[:chain, :chain] = np.tri(chain, dtype=bool)
    for node in range(chain, len(tree)):
        if tree.parents[node] >= 0:
            seen[node] |= seen[tree.parents[node]]
    return seen


def _as_mask(model: Any, seen: Tensor) -> Tensor:
    """Return a mask as the model's attention takes it: a boolean one, or what is added to the attention scores."""
    if model.config._attn_implementation == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=model.dtype, device=seen.device).masked_fill_(
        ~seen, torch.finfo(model.dtype).min
    )
