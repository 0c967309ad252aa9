"""Whether a model computes a tree of endings as it computes plain rows.

A tree needs two things: attention that heeds a mask alone, and positions that come from position ids. Recurrent layers
and convolutions have no mask; ALiBi measures distances in the row, not in the text; a sliding window counts tokens of
the row, so that it must not be shorter than the row. What a model's configuration does not tell, a probe does.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hfpatch.evaluation.scorer.grouping import TokenRequest, Tree, group
from hfpatch.evaluation.scorer.head import Parts, close
from hfpatch.evaluation.scorer.inputs import model_inputs

_MASKED = ("sdpa", "eager")
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_WINDOWS = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size")
_LAYERS = ("layer_types", "layers_block_type", "block_types")


@dataclass(frozen=True)
class Sharing:
    """How long a row with several endings may be.

    Attributes:
        longest: tokens; 0 where endings cannot share a row.
        reason: why they cannot, or why not in any longer row; None where nothing speaks against it.
    """

    longest: int
    reason: str | None = None


def find_sharing(model: Any, parts: Parts, max_length: int, probe: Tensor) -> Sharing:
    """Return in how long a row endings may share their context on this model, by its configuration and a probe.

    Args:
        model: a causal language model, with adapters or without.
        parts: the model in two steps.
        max_length: the longest row that the model takes.
        probe: at least 12 tokens (1, seq).
    """
    config = model.config.get_text_config()
    declared = _declared_obstacle(model, config)
    if declared:
        return Sharing(0, declared)
    if not _equal_on_probe(model, parts, probe):
        return Sharing(0, "a probe gave other numbers")
    windows = [value for name in _WINDOWS if isinstance(value := getattr(config, name, None), int) and value > 0]
    window = min(windows, default=max_length)
    return Sharing(window, f"attention sees {window} tokens") if window < max_length else Sharing(max_length)


def _declared_obstacle(model: Any, config: Any) -> str | None:
    kinds = {str(kind) for name in _LAYERS for kind in (getattr(config, name, None) or ())}
    if getattr(model, "_is_stateful", False) or kinds - _ATTENTION:
        return f"it has layers without a mask ({', '.join(sorted(kinds - _ATTENTION)) or 'recurrent'})"
    if getattr(config, "alibi", False):
        return "ALiBi measures distances in the row"
    body = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    if "position_ids" not in inspect.signature(body.forward).parameters:
        return "its positions are places in the row"
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in _MASKED:
        return f"attention {attention!r} takes no mask of pairs"
    return None


def _equal_on_probe(model: Any, parts: Parts, probe: Tensor) -> bool:
    """Return whether trees of two and three endings give the features of plain rows, in one row and side by side."""
    requests = _probe_requests(probe[0].tolist())
    first, second = group(requests, longest=len(probe[0]) * 4)
    trees = [Tree.joined([first, second]), second]
    rows = [Tree.of(request.tokens) for request in requests]
    try:
        together = parts.features(**model_inputs(model, trees))
    except (TypeError, RuntimeError, ValueError, IndexError):
        return False
    alone = parts.features(**model_inputs(model, rows))
    return all(
        close(
            together[row, nodes].float(),
            alone[index, len(rows[index]) - len(nodes) : len(rows[index])].float(),
            model.dtype,
        )
        for row, tree in enumerate(trees)
        for index, nodes in tree.scored
    )


def _probe_requests(tokens: list[int]) -> list[TokenRequest]:
    context, others = tokens[:6], tokens[6:12]
    endings = [others[:5], [*others[:2], *others[4:], *others[:2]], others[::-1]]
    requests = [TokenRequest.cut(context, ending, max_length=len(tokens)) for ending in endings]
    pair = [TokenRequest.cut(others[:3], ending, max_length=len(tokens)) for ending in (context[:3], context[3:6])]
    return [*requests, *pair]
