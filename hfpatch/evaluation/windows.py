"""The cost of rows by their length, and a warning about long windows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

logger = logging.getLogger(__name__)

_SHORT = 1024  # tokens, GPT-2's context
_NOTABLE = 1.25  # times the operations of a token in a short window


def row_operations(model: Any, lengths: ArrayLike) -> NDArray[np.float64]:
    """Return the floating-point operations of forward passes over rows of n tokens each.

    .. math::
        n (2 w + 4 d Σ_i min(n, r_i))      w: weights in matrix products; d: hidden size; r_i: reach of block i

    Embeddings are free. Attention computes whole squares, with their masked half.
    """
    config, rows = model.config.get_text_config(), np.asarray(lengths, np.float64)
    head = getattr(model.get_output_embeddings(), "weight", None)
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(head)}
    weights = sum(value.numel() for value in model.parameters() if value.ndim > 1 and id(value) not in lookups)
    window, blocks = getattr(config, "sliding_window", None), config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * blocks
    reach = sum(np.minimum(rows, window) if "sliding" in kind and window else rows for kind in kinds)
    return np.asarray(rows * (2.0 * weights + 4.0 * config.hidden_size * reach))


def long_windows(model: Any, lengths: Sequence[int], longest: int) -> str:
    """Return a sentence on the cost of windows if some have the longest length and that is expensive; else ""."""
    number = sum(length >= longest for length in lengths)
    long, short = row_operations(model, [longest, _SHORT]) / [longest, _SHORT]
    if not number or long < _NOTABLE * short:
        return ""
    return (
        f"{number:,} windows of {longest:,} tokens, the model's longest, each {long * longest / 1e12:.2g} TFLOP: "
        f"{long / short:.1f} times as much a token as in windows of {_SHORT:,}; --max-length {_SHORT} (max_length in "
        "recipes) shortens them, and changes the perplexity"
    )


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, but not again."""
    logger.warning("%s", text)
