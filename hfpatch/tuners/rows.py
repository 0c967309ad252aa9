"""An adapter for each row of a batch, as PEFT's ``adapter_names`` asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hfpatch.errors import HfpatchError
from hfpatch.tuners.hooks import PLACES


class _Rows(threading.local):
    """The adapters of the rows of a call under way in this thread, by the layer."""

    def __init__(self) -> None:
        self.names: dict[Any, tuple[str, ...]] = {}


_ROWS = _Rows()


def names_of_rows(layer: Any) -> tuple[str, ...] | None:
    """Return the name of each row's adapter in a layer's call; None where the active ones act in all rows."""
    return _ROWS.names.get(layer)


@contextmanager
def choosing(layers: Iterable[Any], names: Sequence[str]) -> Iterator[None]:
    """Let each row of a batch have its own adapter for a while; ``__base__`` has none."""
    chosen = dict.fromkeys(layers, tuple(names))
    _ROWS.names |= chosen
    try:
        yield
    finally:
        for layer in chosen:
            _ROWS.names.pop(layer, None)


class OfRows:
    """A method that acts in some rows of a batch.

    Args:
        config: the method.
        rows: whether it acts, for each row.
    """

    def __init__(self, config: Any, rows: Sequence[bool]) -> None:
        self.config, self.rows = config, rows

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.config, name)
        return partial(self._act, found) if name in PLACES else found

    def _act(self, function: Any, parts: Any, value: Tensor, *others: Any) -> Tensor:
        if len(value) != len(self.rows):
            raise HfpatchError(f"adapter_names: {len(self.rows)} names for {len(value)} rows; give one for each")
        rows = torch.tensor(self.rows, device=value.device).view(-1, *[1] * (value.dim() - 1))
        return torch.where(rows, function(parts, value, *others), value)
