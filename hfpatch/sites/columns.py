"""Which output columns of a projection are query, key and value.

h: heads, g: query heads per key/value head, k: head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """A regular set of output columns: ``groups`` groups of ``width``, in each the ``length`` from ``start`` on.

    Every layout that projections use has this form:

    ====================  =============================  =========================================
    layout                columns                        query is
    ====================  =============================  =========================================
    separate              [q]                            1 group of h·k, all of it
    concatenated          [q all, k all, v all]          1 group, the first h·k
    per head              h times [q, k, v]              h groups of 3k, the first k of each
    per key/value group   h/g times [q·g, k, v]          h/g groups of (g + 2)k, the first g·k of each
    ====================  =============================  =========================================
    """

    groups: int
    width: int
    start: int
    length: int

    @property
    def size(self) -> int:
        """The number of columns."""
        return self.groups * self.length

    def read(self, out: Tensor) -> Tensor:
        """Take the columns: ``(..., groups·width)`` -> ``(..., groups·length)``, head by head."""
        grouped = out.reshape(*out.shape[:-1], self.groups, self.width)
        return grouped[..., self.start : self.start + self.length].flatten(-2)

    def write(self, out: Tensor, value: Tensor) -> Tensor:
        """Return ``out`` with the columns replaced by ``value`` ``(..., groups·length)``; ``out`` stays as it is."""
        if self.length == self.width:
            return value
        grouped = out.reshape(*out.shape[:-1], self.groups, self.width)
        new = value.reshape(*value.shape[:-1], self.groups, self.length)
        end = self.start + self.length
        return torch.cat([grouped[..., : self.start], new, grouped[..., end:]], dim=-1).flatten(-2)
