"""Running a model on batches of text while hooks listen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from hfpatch.sites import AttentionSite, base_model, find_sites
from hfpatch.tuners.adapters import block_of as block_of
from hfpatch.tuners.layer import SurgeryLayer, surgery_layer

Batch = Mapping[str, Tensor]
"""``input_ids`` ``(batch, seq)`` and optionally ``attention_mask``, whose zeros are not counted, and
``position_ids``, which restart where a document begins; other keys are ignored."""

_INPUTS = ("input_ids", "attention_mask", "position_ids")
_Layer = TypeVar("_Layer", bound=SurgeryLayer)


@dataclass(frozen=True)
class Tokens:
    """Which tokens of a batch count, and where they stand.

    Attributes:
        counted: ``(batch, seq)`` bool, False for padding.
        positions: ``(batch, seq)`` long, from 0 in each document; padding has 0 too.
    """

    counted: Tensor
    positions: Tensor

    @property
    def pairs(self) -> Tensor:
        """Which key (last axis) each query may see: ``(batch, seq, seq)`` bool, causal and inside one document."""
        document = ((self.positions == 0) & self.counted).cumsum(-1)
        same = document[:, :, None] == document[:, None, :]
        length = self.positions.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        return same & causal & self.counted[:, :, None] & self.counted[:, None, :]


def tokens_of(batch: Batch) -> Tokens:
    """Read a batch's mask and positions."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    given = batch.get("position_ids")
    positions = (counted.cumsum(-1) - 1).clamp_min(0) if given is None else given
    return Tokens(counted, positions)


@torch.no_grad()
def run(model: nn.Module, batches: Iterable[Batch], begin: Callable[[Batch], None]) -> None:
    """Run a model's blocks on each batch, without gradients and dropout; ``begin`` is told the batch first.

    The output head is left out where the model says which part holds the blocks.
    """
    body = _body(model)
    with evaluating(model):
        for batch in batches:
            begin(batch)
            body(**{name: batch[name].to(_device(model)) for name in _INPUTS if name in batch}, use_cache=False)


def _body(model: nn.Module) -> nn.Module:
    base = base_model(model)
    body = getattr(base, "base_model", None)
    return body if isinstance(body, nn.Module) else base


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and every module back to the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def surgery_layers(model: nn.Module, kind: type[_Layer]) -> Iterator[tuple[AttentionSite, _Layer]]:
    """Yield the sites that hold a tuner layer of this kind, with it."""
    for site in find_sites(model):
        layer = surgery_layer(site, kind)
        if layer is not None:
            yield site, layer
