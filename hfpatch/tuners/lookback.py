"""The values of earlier positions, for methods that mix tokens: in the row, in a cache, within a document.

Which positions belong together is read where the attention reads it, from its own arguments: position ids, mask and
cache. So a token looks back where its attention may, also when gradient checkpointing recomputes the block.
An export carries this code, so it knows nothing of PEFT.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.tuners.hidden_state import hidden_argument

MARGIN = 128
"""How many tokens can be taken back from a cache at least, as assisted generation does, beside those of a call."""


@dataclass
class Kept:
    """The last values ``(batch, kept, width)`` of each row that a cache keeps for one method at one place.

    Args:
        values: of the last positions.
        count: how many positions there have been.
        steps: how many the method looks back.
    """

    values: Tensor
    count: int
    steps: int


class Remembering:
    """A layer of a transformers cache that treats the values kept in it as it treats its keys and values."""

    _layer_type = None  # transformers registers subclasses that name one
    kept: dict[str, Kept]

    def reset(self) -> None:
        """Forget everything."""
        self.kept.clear()
        super().reset()  # type: ignore[misc]  # of the cache that this is mixed into

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: a negative number of them."""
        before = length_of(self)
        super().crop(tokens_to_remove)  # type: ignore[misc]  # of the cache that this is mixed into
        removed = -tokens_to_remove if before is None else before - (length_of(self) or 0)
        for kept in self.kept.values():
            left = max(0, kept.values.shape[1] - removed)
            if left < min(kept.steps, kept.count - removed):
                raise HfpatchError(
                    f"a cache cannot take back {removed} tokens: a method looks back {kept.steps} positions, of which "
                    f"only {left} are kept; start again with an empty cache"
                )
            kept.values, kept.count = kept.values[:, :left], kept.count - removed

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]  # of the cache that this is mixed into
        for kept in self.kept.values():
            kept.values = kept.values.index_select(0, beam_idx.to(kept.values.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]  # of the cache that this is mixed into
        for kept in self.kept.values():
            kept.values = kept.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)  # type: ignore[misc]  # of the cache that this is mixed into
        for kept in self.kept.values():
            kept.values = kept.values[indices.to(kept.values.device)]


def length_of(layer: Any) -> int | None:
    """Return how many tokens a layer of a cache holds; None for no layer, and one that reads another's."""
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else None


@functools.cache
def _remembering(kind: Any) -> Any:
    return type(f"Remembering{kind.__name__}", (Remembering, kind), {"__module__": kind.__module__})


@dataclass
class Row:
    """The earlier positions that the tokens of one call of an attention may look back at.

    Args:
        length: of the sequence in this call; None if it is not known.
        positions: position ids ``(batch or 1, seq)``, which restart where a document begins; None if there are none.
        mask: True where a query reads a key, ``(batch or 1, seq, keys)``; None where every earlier one is read.
        layer: the layer of the cache, which keeps the values of earlier calls; None without a cache.
        past: how many tokens that layer held before this call; None where it does not say.
    """

    length: int | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None
    layer: Any = None
    past: int | None = None
    before: dict[str, Tensor] = field(default_factory=dict)  # by slot: several modules may read one hidden state

    def earlier(self, slot: str, value: Tensor, steps: int) -> tuple[Tensor, ...]:
        """Return ``value`` at 1, 2, ..., ``steps`` positions earlier, each ``(batch, seq, width)``.

        Values before the start of a document and at padding are 0.

        Args:
            slot: the key of the values in the cache.
            value: ``(batch, seq, width)``.
            steps: how far to look back.
        """
        length = value.shape[1] if self.length is None else self.length
        if value.dim() != 3 or value.shape[1] != length:
            shape = tuple(value.shape)
            raise HfpatchError(f"{slot}: earlier values are those of (batch, {length}, width), not of {shape}")
        before = value[:, :0] if self.layer is None else self._kept(slot, value, steps)
        wide = F.pad(torch.cat([before, value], 1), (0, 0, steps - before.shape[1], 0))
        shifts = []
        for back in range(1, steps + 1):
            shifted, allowed = wide[:, steps - back : steps - back + length], None  # allowed: (batch or 1, seq)
            if self.positions is not None and length > back:
                follows = self.positions[:, back:] - self.positions[:, :-back] == back
                allowed = F.pad(follows, (back, 0), value=True)  # the mask decides about tokens of earlier calls
            if self.mask is not None:
                read = self.mask.diagonal(self.mask.shape[-1] - length - back, dim1=1, dim2=2)
                read = F.pad(read, (length - read.shape[1], 0), value=False)
                allowed = read if allowed is None else allowed & read
            shifts.append(shifted if allowed is None else shifted.masked_fill(~allowed[..., None], 0))
        return tuple(shifts)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no type for it
    def _kept(self, slot: str, value: Tensor, steps: int) -> Tensor:
        """Return the values before this call, at most ``steps``; the cache then keeps those of this call too."""
        if slot not in self.before:
            kept = self.layer.kept.get(slot) or Kept(value[:, :0], 0, steps)
            if self.past is not None and kept.count != self.past:
                raise HfpatchError(
                    f"{slot}: the cache holds {self.past} tokens, of which the method has seen {kept.count}; it looks "
                    "back, so start with an empty cache, without prefix tuning"
                )
            values = torch.cat([kept.values.to(value), value], 1)[:, -(steps + max(value.shape[1], MARGIN)) :]
            self.layer.kept[slot] = Kept(values, kept.count + value.shape[1], steps)
            self.before[slot] = kept.values[:, max(0, kept.values.shape[1] - steps) :].to(value)
        return self.before[slot]


def row_of(names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row:
    """Read the row from the arguments of one call of an attention.

    Args:
        names: the names of the attention's arguments.
        module: the attention.
        args: the arguments by position.
        kwargs: the arguments by name.

    Raises:
        HfpatchError: if they do not say which positions belong together, or the cache cannot keep further values.
    """
    arguments = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
    length = hidden_argument(args, kwargs).shape[1]
    kind = known_attention(module)
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != length:
        positions = None

    # The mask, as True where a query reads a key
    mask = arguments.get("attention_mask")
    if mask is not None:
        # Eager attention adds its mask to the scores; booleans may mean either there
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or (kind == "eager" and mask.dtype == torch.bool):
            raise cannot_look_back(module, "its mask does not say for each query which keys it reads")
        shape = tuple(mask.shape)
        is_added = mask.is_floating_point() and mask.dim() == 4
        mask = mask > torch.finfo(mask.dtype).min / 2 if is_added else mask.bool()
        mask = mask[:, 0] if mask.dim() == 4 else mask[:, None]
        if mask.shape[1] not in (1, length) or mask.shape[2] < length:
            raise cannot_look_back(module, f"its mask {shape} is of another sequence than its input of {length}")
        mask = mask.expand(-1, length, -1)

    # The cache, of which this attention uses one layer
    caches = (value for value in arguments.values() if hasattr(value, "get_seq_length") and hasattr(value, "update"))
    cache: Any = next(caches, None)
    layer = None if cache is None else _layer(module, cache, arguments.get("layer_idx"))
    if layer is None and mask is not None and mask.shape[-1] != length:
        raise cannot_look_back(module, "its keys of earlier calls are in no cache of transformers; set use_cache=False")
    return Row(length, positions, mask, layer, past=length_of(layer))


def known_attention(module: nn.Module) -> str:
    """Return how an attention is computed, by the name that transformers gives it.

    Raises:
        HfpatchError: if its arguments do not say which positions follow each other: those of servers, which put the
            tokens of several texts into a row and keep the cache themselves, or masks in the form of a function.
    """
    kind = getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"
    if kind not in ("eager", "sdpa") and ("flash" not in kind or "|" in kind):
        why = f"attention {kind!r} does not say which positions follow each other; load it with attn_implementation="
        raise cannot_look_back(module, f"{why}'sdpa'")
    return str(kind)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no type for it
def _layer(module: nn.Module, cache: Any, index: int | None) -> Any:
    """Return the layer of a cache that an attention uses: of that index, or the module's own; it keeps values."""
    cache = getattr(cache, "self_attention_cache", cache)
    index = getattr(module, "layer_idx", getattr(module, "layer_id", None)) if index is None else index
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or not isinstance(index, int):
        raise cannot_look_back(module, f"its cache, {type(cache).__name__}, has no layer for it; set use_cache=False")
    while len(layers) <= index and getattr(cache, "layer_class_to_replicate", None):  # as the cache itself grows
        layers.append(cache.layer_class_to_replicate())
    if len(layers) <= index or not hasattr(layers[index], "batch_select_indices"):
        held = type(layers[index]).__name__ if len(layers) > index else "nothing"
        raise cannot_look_back(
            module, f"{type(cache).__name__} has a {held}, which keeps no further values; use a DynamicCache"
        )
    layer: Any = layers[index]
    if not isinstance(layer, Remembering):  # one that keeps values takes its place, and shares all that there is
        stock: Any = type(layer)
        kind = _remembering(stock)
        layers[index] = kind.__new__(kind)
        layers[index].__dict__ = layer.__dict__
        layers[index].kept = {}
    return layers[index]


def cannot_look_back(module: nn.Module, why: str) -> HfpatchError:
    """Return the refusal of a method that looks back."""
    return HfpatchError(f"{type(module).__name__} takes no method that looks back: {why}")
