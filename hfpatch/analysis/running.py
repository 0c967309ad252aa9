"""Run a model on batches of text: counted tokens, their losses, means over them, and the layers of a method."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite, base_model, find_sites
from hfpatch.support.modes import evaluating
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.layer import MethodLayer, method_layer

Key = TypeVar("Key", bound=Hashable)
Batch = Mapping[str, Tensor]
"""``input_ids`` ``(batch, seq)`` and optionally ``attention_mask``, whose zeros are not counted, and
``position_ids``, which restart where a document begins; other keys are ignored."""

_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch, ``(batch, seq)`` each."""

    counted: Tensor
    """bool, False for padding."""
    positions: Tensor
    """long, from 0 in each document; padding has 0 too."""

    def of(self, values: Tensor) -> Tensor:
        """Return the values of the tokens that are counted: ``(batch, seq, n)`` -> ``(tokens, n)``, in fp64 on the CPU.

        Raises:
            HfpatchError: if they are of other positions, in models that add some to the text or read it in pieces.
        """
        if values.shape[:2] != self.counted.shape:
            rows, length = self.counted.shape
            read = " x ".join(map(str, values.shape[:-1]))
            raise HfpatchError(f"an attention reads {read} positions of {rows} x {length} tokens, so none is a token's")
        return values.detach().cpu().double()[self.counted.cpu()]

    @property
    def pairs(self) -> Tensor:
        """The keys (last axis) that each query sees: ``(batch, seq, seq)`` bool, causal and inside one document."""
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
def run(model: nn.Module, batches: Iterable[Batch], begin: Callable[[Tokens], None]) -> None:
    """Run a model's blocks on each batch, without gradients and dropout; ``begin`` is called with its tokens before.

    The output head is not run where the model says which part holds the blocks.
    """
    base = base_model(model)
    body = getattr(base, "base_model", None)
    blocks = body if isinstance(body, nn.Module) else base
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in batches:
            begin(tokens_of(batch))
            blocks(**{name: batch[name].to(device) for name in _INPUTS if name in batch}, use_cache=False)


def next_token_losses(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the losses of predicted tokens in nats ``(count,)`` and their mask ``(batch, seq - 1)`` bool."""
    inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
    tokens = tokens_of(inputs)
    predicted = (tokens.counted & (tokens.positions > 0))[:, 1:]
    logits = model(**inputs, use_cache=False).logits[:, :-1][predicted].float()
    return F.cross_entropy(logits, inputs["input_ids"][:, 1:][predicted], reduction="none"), predicted


def method_layers(model: nn.Module, method: type[MethodConfig]) -> Iterator[tuple[AttentionSite, MethodLayer]]:
    """Yield the sites that have a layer of this method, with the layer."""
    for site in find_sites(model):
        layer = method_layer(site, method)
        if layer is not None:
            yield site, layer


@dataclass
class TokenMeans(Generic[Key]):
    """Sums of several numbers a token, by key; every token weighs the same, padding is left out."""

    _tokens: Tokens | None = None
    _sums: dict[Key, tuple[Tensor, int]] = field(default_factory=dict)

    def begin(self, tokens: Tokens) -> None:
        """Set the tokens of the batch that the next values belong to."""
        self._tokens = tokens

    def add(self, key: Key, values: Tensor) -> None:
        """Add ``(batch, seq, n)`` numbers."""
        assert self._tokens is not None
        values = self._tokens.of(values)
        total, count = self._sums.get(key, (0, 0))
        self._sums[key] = (total + values.sum(0), count + len(values))

    def overall(self) -> dict[Key, list[float]]:
        """Return the n means over tokens of each key that has any, in the order of their first values."""
        return {key: (total / count).tolist() for key, (total, count) in self._sums.items() if count}


def norm_ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return ‖part‖ / ‖whole‖ over the last axis, in fp32: ``(..., n)`` -> ``(...)``."""
    ratio: Tensor = part.float().norm(dim=-1) / whole.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ratio
