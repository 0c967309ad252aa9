"""The effect of each layer's adapters: disable those of one layer at a time and score the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hfpatch.analysis.running import Batch, next_token_losses
from hfpatch.errors import HfpatchError
from hfpatch.support.modes import evaluating, keeping_flags
from hfpatch.tuners.adapters import adapters_disabled, block_finder

Score = Callable[[nn.Module], Sequence[float]]
"""Returns one number an item (a document, a question), for the same items at every call."""


@dataclass(frozen=True)
class Ablation:
    """The change of a score by disabling adapters.

    Attributes:
        layer: the block whose adapters were disabled; None for all of them, which leaves the base.
        score: the mean over items without them.
        change: ``score`` minus that of the full patch; a higher loss means that the adapters help.
        error: standard error of the change over items (paired).
    """

    layer: int | None
    score: float
    change: float
    error: float


@dataclass(frozen=True)
class Ablations:
    """The mean score of the full patch over items, and the scores without each layer in turn, then without all."""

    score: float
    items: int
    without: list[Ablation]


def ablate_layers(model: nn.Module, score: Score) -> Ablations:
    """Score a patched model as it is, with each block's adapters disabled in turn, and with all of them disabled.

    Adapters of every method in a block are disabled, not removed; trainable flags and dropout stay as they were. A
    layer without parameters, which only passes tensors to later ones, stays active.

    Raises:
        HfpatchError: if the model has no adapters, or the score returns fewer than two numbers or another count.
    """
    block_of = block_finder(model)
    by_block: dict[int, list[BaseTunerLayer]] = {}
    for name, module in model.named_modules():
        has_parameters = any(True for _ in module.parameters())
        if has_parameters and isinstance(module, BaseTunerLayer) and (block := block_of(name)) >= 0:
            by_block.setdefault(block, []).append(module)
    if not by_block:
        raise HfpatchError("the model has no adapters to disable; patch it first")
    full, without = _scored(score, model), []
    for layer in (*sorted(by_block), None):
        chosen = [adapter for at in by_block if layer in (at, None) for adapter in by_block[at]]
        with keeping_flags(model), adapters_disabled(chosen):
            values = _scored(score, model, items=len(full))
        change = values - full
        error = float(change.std()) / len(change) ** 0.5
        without.append(Ablation(layer, float(values.mean()), float(change.mean()), error))
    return Ablations(float(full.mean()), len(full), without)


@torch.no_grad()
def document_losses(model: Any, batches: Iterable[Batch]) -> list[float]:
    """Return the mean loss of each row, in nats a predicted token; rows without predicted tokens are left out."""
    losses: list[float] = []
    with evaluating(model):
        for batch in batches:
            nats, predicted = next_token_losses(model, batch)
            by_token = torch.zeros(predicted.shape, dtype=torch.float64, device=nats.device)
            by_token[predicted] = nats.double()
            sums, counts = by_token.sum(1), predicted.sum(1)
            losses += [float(total / count) for total, count in zip(sums, counts, strict=True) if count]
    return losses


def _scored(score: Score, model: nn.Module, *, items: int | None = None) -> torch.Tensor:
    values = torch.tensor(list(score(model)), dtype=torch.float64)
    if len(values) < 2 or (items is not None and len(values) != items):
        raise HfpatchError(f"the score returned {len(values)} numbers; it must return the same two or more each time")
    return values
