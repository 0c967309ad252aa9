"""The forms that query, key and value projections take, as functions of an attention module and its config.

h: heads, g: query heads per key/value head, k: head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.modules import features, has_module, linear_path, submodule, unwrapped

TARGETS = ("query", "key", "value")


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


@dataclass(frozen=True)
class Projection:
    """Where one of query, key, value is computed: a module (path below the attention) and its columns.

    ``source`` names the module below the attention that reads the hidden state, where the projection itself reads a
    low-rank image of it (multi-head latent attention); None where the projection reads the hidden state. ``beside``
    names further modules that the architecture adds to the attention's scores or to the projection's output, and that
    are left as they are (shared adapters, relative positions computed from the hidden state).
    """

    path: str
    columns: Columns
    source: str | None = None
    beside: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The module and those beside it."""
        return self.path, *self.beside


Projections = Mapping[str, Projection]
Layout = Callable[[nn.Module, Any], Projections]
"""A function of the attention module and the configuration; a partial one, whose paths a hash of the family sees."""


def separate(
    *,
    query: str = "q_proj",
    key: str = "k_proj",
    value: str = "v_proj",
    shared: bool = False,
    query_beside: tuple[str, ...] = (),
) -> Layout:
    """Three projections, one each.

    Args:
        query: path of the query's projection.
        key: path of the key's.
        value: path of the value's.
        shared: whether some layers read another one's keys and values and have the query's only.
        query_beside: further modules that act as a query does, see :class:`Projection`.
    """
    return partial(separate_columns, query=query, key=key, value=value, shared=shared, query_beside=query_beside)


def concatenated(path: str) -> Layout:
    """One projection with columns [q all, k all, v all]; grouped queries included."""
    return partial(concatenated_columns, path=path)


def per_head(path: str) -> Layout:
    """One projection with, for every head, the columns [q, k, v]."""
    return partial(grouped_columns, path=path)


def gated(*, query: str = "q_proj", key: str = "k_proj", value: str = "v_proj") -> Layout:
    """Three projections, that of the query with, for every head, the columns [q, gate of the output], equally many."""
    return partial(gated_columns, query=query, key=key, value=value)


def equal_parts(path: str, *, order: tuple[str, ...] = TARGETS, groups: int = 1) -> Layout:
    """One projection with, for each of ``groups`` groups, one part for every target, in this order and equally wide."""
    return partial(equal_columns, path=path, order=order, groups=groups)


def latent(attention: nn.Module, config: Any) -> Projections:
    """Multi-head latent attention: q_a_proj, a norm, q_b_proj; or one q_proj where the query has no latent.

    Keys and values of all heads come from one latent and a shared rotary part, so that neither has a projection of its
    own: only the query can be made nonlinear.
    """
    if has_module(attention, "q_a_proj"):
        return {"query": whole(attention, "q_b_proj", source="q_a_proj")}
    return {"query": whole(attention, "q_proj")}


def separate_columns(
    attention: nn.Module,
    config: Any,
    *,
    query: str,
    key: str,
    value: str,
    shared: bool,
    query_beside: tuple[str, ...],
) -> Projections:
    """Return three whole projections, see :func:`separate`."""
    paths = {"query": query, "key": key, "value": value}
    if shared:
        paths = {t: path for t, path in paths.items() if t == "query" or has_module(attention, path)}
    projections = {target: whole(attention, path) for target, path in paths.items()}
    return projections | {"query": replace(projections["query"], beside=query_beside)}


def gated_columns(attention: nn.Module, config: Any, *, query: str, key: str, value: str) -> Projections:
    """Return the columns of the form [q, gate] for each head, and two whole projections."""
    heads = int(getattr(attention, "num_heads", None) or head_counts(config)[0])
    width = divide(out_features(attention, query), heads, query)
    projections = {"query": Projection(query, Columns(heads, width, 0, divide(width, 2, query)))}
    return projections | {"key": whole(attention, key), "value": whole(attention, value)}


def concatenated_columns(attention: nn.Module, config: Any, path: str, kv_heads: int | None = None) -> Projections:
    """Return the columns of the form [q all, k all, v all]; ``kv_heads`` are the configuration's unless given."""
    heads, default = head_counts(config)
    kv_heads, total = kv_heads or default, out_features(attention, path)
    k = divide(total, heads + 2 * kv_heads, path)
    spans = {"query": (0, heads), "key": (heads, kv_heads), "value": (heads + kv_heads, kv_heads)}
    return {t: Projection(path, Columns(1, total, start * k, n * k)) for t, (start, n) in spans.items()}


def grouped_columns(attention: nn.Module, config: Any, path: str, groups: int | None = None) -> Projections:
    """Return the columns of the form [q·g, k, v] for each of ``groups`` key/value heads; without, for each head."""
    heads, _ = head_counts(config)
    groups = groups or heads
    g = divide(heads, groups, path)
    width = divide(out_features(attention, path), groups, path)
    k = divide(width, g + 2, path)
    spans = {"query": (0, g), "key": (g, 1), "value": (g + 1, 1)}
    return {t: Projection(path, Columns(groups, width, start * k, n * k)) for t, (start, n) in spans.items()}


def equal_columns(attention: nn.Module, config: Any, path: str, order: tuple[str, ...], groups: int) -> Projections:
    """Return the columns of equal parts, see :func:`equal_parts`."""
    width = divide(out_features(attention, path), groups, path)
    part = divide(width, len(order), path)
    return {t: Projection(path, Columns(groups, width, i * part, part)) for i, t in enumerate(order)}


def head_counts(config: Any) -> tuple[int, int]:
    """Return (query heads, key/value heads) of a model config."""
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


def whole(attention: nn.Module, path: str, *, source: str | None = None) -> Projection:
    """Return the projection whose columns all belong to one target, possibly in a module of its own."""
    path = linear_path(attention, path) or path
    width = out_features(attention, path)
    return Projection(path, Columns(1, width, 0, width), source)


def out_features(attention: nn.Module, path: str) -> int:
    """Return the output width of a projection below the attention."""
    return features(unwrapped(submodule(attention, path, of=type(attention).__name__)))[1]


def divide(total: int, parts: int, path: str) -> int:
    """Return ``total / parts``.

    Raises:
        HfpatchError: if it is not a whole number, so that the declared layout cannot be right.
    """
    if total % parts:
        raise HfpatchError(f"{path}: {total} columns do not divide into {parts} equal parts; the layout is wrong")
    return total // parts


def require_columns(attention: nn.Module, projections: Projections, *, of: str) -> None:
    """Refuse a layout whose columns are not those of its modules.

    Raises:
        HfpatchError: naming the target and its columns; the message begins with ``of``.
    """
    if not projections:
        raise HfpatchError(f"{of}: the declared layout names no projection")
    for target, projection in projections.items():
        path, columns = projection.path, projection.columns
        if target not in TARGETS:
            raise HfpatchError(f"{of}: the layout names {target!r}, not query, key or value")
        if (total := out_features(attention, path)) != columns.groups * columns.width:
            groups = f"{columns.groups} groups of {columns.width}"
            raise HfpatchError(f"{of}: {target}: {path} has {total} columns, not {groups}")
        if not 0 <= columns.start < (end := columns.start + columns.length) <= columns.width:
            group = f"{columns.width} in a group of {path}"
            raise HfpatchError(f"{of}: {target}: columns {columns.start} to {end} of {group}")
