"""The forms that query, key and value projections take, as functions of an attention module and its config.

h: heads, g: query heads per key/value head, k: head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.columns import Columns
from hfpatch.sites.modules import features, submodule, unwrapped

TARGETS = ("query", "key", "value")


@dataclass(frozen=True)
class Projection:
    """Where one of query, key, value is computed: a module (path below the attention) and its columns."""

    path: str
    columns: Columns


Projections = Mapping[str, Projection]
Layout = Callable[[nn.Module, Any], Projections]


def separate(*, query: str = "q_proj", key: str = "k_proj", value: str = "v_proj") -> Layout:
    """Three projections, one each."""

    def layout(attention: nn.Module, config: Any) -> Projections:
        paths = {"query": query, "key": key, "value": value}
        return {target: _whole(attention, path) for target, path in paths.items()}

    return layout


def concatenated(path: str) -> Layout:
    """One projection with columns [q all, k all, v all]; grouped queries included."""

    def layout(attention: nn.Module, config: Any) -> Projections:
        heads, kv_heads = head_counts(config)
        return concatenated_columns(attention, path, heads=heads, kv_heads=kv_heads)

    return layout


def per_head(path: str) -> Layout:
    """One projection with, for every head, the columns [q, k, v]."""

    def layout(attention: nn.Module, config: Any) -> Projections:
        heads, _ = head_counts(config)
        return grouped_columns(attention, path, heads=heads, groups=heads)

    return layout


def concatenated_columns(attention: nn.Module, path: str, *, heads: int, kv_heads: int) -> Projections:
    """Return the columns of the form [q all, k all, v all]."""
    total = _out_features(attention, path)
    k = _divide(total, heads + 2 * kv_heads, path)
    spans = {"query": (0, heads), "key": (heads, kv_heads), "value": (heads + kv_heads, kv_heads)}
    return {t: Projection(path, Columns(1, total, start * k, n * k)) for t, (start, n) in spans.items()}


def grouped_columns(attention: nn.Module, path: str, *, heads: int, groups: int) -> Projections:
    """Return the columns of the form [q·g, k, v] for each of ``groups`` key/value heads; g = 1 is per head."""
    g = _divide(heads, groups, path)
    width = _divide(_out_features(attention, path), groups, path)
    k = _divide(width, g + 2, path)
    spans = {"query": (0, g), "key": (g, 1), "value": (g + 1, 1)}
    return {t: Projection(path, Columns(groups, width, start * k, n * k)) for t, (start, n) in spans.items()}


def head_counts(config: Any) -> tuple[int, int]:
    """Return (query heads, key/value heads) of a model config."""
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


def _whole(attention: nn.Module, path: str) -> Projection:
    width = _out_features(attention, path)
    return Projection(path, Columns(1, width, 0, width))


def _out_features(attention: nn.Module, path: str) -> int:
    return features(unwrapped(submodule(attention, path, of=type(attention).__name__)))[1]


def _divide(total: int, parts: int, path: str) -> int:
    if total % parts:
        raise HfpatchError(
            f"{path}: {total} columns do not divide into {parts} equal parts; the declared layout is wrong"
        )
    return total // parts
