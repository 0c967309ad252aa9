"""Which layer's injection matters: take one layer's adapters out of action at a time and score the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hfpatch.analysis.running import Batch, block_of, evaluating, tokens_of
from hfpatch.errors import HfpatchError

Score = Callable[[nn.Module], Sequence[float]]
"""Returns one number an item (a document, a question), for the same items at every call."""


@dataclass(frozen=True)
class Ablation:
    """What taking injections out of action does to a score.

    Attributes:
        layer: the block whose injection was taken out; None for all of them, which leaves the base.
        score: the mean over items without it.
        change: that less the whole patch's; for a loss, a rise means that the injection was of use.
        error: standard error of the change over items (paired).
    """

    layer: int | None
    score: float
    change: float
    error: float


@dataclass(frozen=True)
class Ablations:
    """The scores of a patched model, whole and with parts of the patch taken out.

    Attributes:
        score: of the whole patch, the mean over items.
        items: how many items were scored.
        without: each layer in turn, then all.
    """

    score: float
    items: int
    without: list[Ablation]


def ablate_layers(model: nn.Module, score: Score) -> Ablations:
    """Score a patched model whole, with each block's injection out of action in turn, and with all of them.

    Adapters of every method count (LoRA too) that lie in a block; nothing is removed, and trainable flags and dropout
    are left as they were.

    Args:
        model: a patched model.
        score: see :data:`Score`.

    Raises:
        HfpatchError: if the model has no adapters, or the score returns fewer than two numbers or another count.
    """
    layers = _by_block(model)
    if not layers:
        raise HfpatchError("the model has no adapters, so there is no injection to take out; patch it first")
    whole = _scored(score, model, None)
    without = []
    for block in (*sorted(layers), None):
        chosen = [layer for key, held in layers.items() if block is None or key == block for layer in held]
        with out_of_action(chosen):
            without.append(_compared(block, _scored(score, model, len(whole)), whole))
    return Ablations(float(whole.mean()), len(whole), without)


@torch.no_grad()
def document_losses(model: Any, batches: Iterable[Batch]) -> list[float]:
    """Return the mean loss of each row, in nats a predicted token; rows with nothing to predict are left out."""
    losses: list[float] = []
    with evaluating(model):
        for batch in batches:
            inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
            logits = model(**inputs, use_cache=False).logits[:, :-1].float()
            tokens = tokens_of(inputs)
            predicted = (tokens.counted & (tokens.positions > 0))[:, 1:]
            targets = inputs["input_ids"][:, 1:]
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
            sums, counts = (nats.double() * predicted).sum(1), predicted.sum(1)
            losses += [float(total / count) for total, count in zip(sums, counts, strict=True) if count]
    return losses


@contextmanager
def out_of_action(layers: Sequence[BaseTunerLayer]) -> Iterator[None]:
    """Disable tuner layers, and put their state and their parameters' flags back."""
    flags = {p: p.requires_grad for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()}
    enabled = [layer for layer in layers if not layer.disable_adapters]
    for layer in enabled:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)
        for parameter, flag in flags.items():
            parameter.requires_grad = flag


def _by_block(model: nn.Module) -> dict[int, list[BaseTunerLayer]]:
    found: dict[int, list[BaseTunerLayer]] = {}
    for name, module in model.named_modules():
        block = block_of(name)
        if block >= 0 and isinstance(module, BaseTunerLayer):
            found.setdefault(block, []).append(module)
    return found


def _scored(score: Score, model: nn.Module, expected: int | None) -> torch.Tensor:
    values = torch.tensor(list(score(model)), dtype=torch.float64)
    if len(values) < 2 or (expected is not None and len(values) != expected):
        raise HfpatchError(f"the score returned {len(values)} numbers; it must return the same two or more each time")
    return values


def _compared(block: int | None, values: torch.Tensor, whole: torch.Tensor) -> Ablation:
    differences = values - whole
    error = float(differences.std()) / len(differences) ** 0.5
    return Ablation(block, float(values.mean()), float(differences.mean()), error)
