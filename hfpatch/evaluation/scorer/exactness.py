"""Whether a model computes a tree of endings, or a padded row, as it computes plain rows.

A tree needs two things: attention that depends on the mask alone, and positions that come from position ids. Recurrent
layers and convolutions have no mask; ALiBi uses distances in the row, not in the text; a sliding window counts tokens
of the row, so it must not be shorter than the row. A probe tests the rest, which no configuration says, at the lengths
that are scored: a limit (a window, a number of selected keys) has an effect only in longer rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfpatch.evaluation.scorer.batching import model_inputs
from hfpatch.evaluation.scorer.head import Parts
from hfpatch.evaluation.scorer.trees import TokenRequest, Tree, group
from hfpatch.evaluation.scorer.trimming import Modules, only_at, trimmable
from hfpatch.sites import input_device
from hfpatch.sites.lm_head import close

SHORT = 18  # tokens of the first probe's tree of three endings
SHORT_PATH = 12  # of each of its texts
_SHORT_TOKENS = 105  # that the first probe computes
_SEEDS = range(3)
_FAILURES = (TypeError, RuntimeError, ValueError, IndexError, AssertionError, AttributeError, KeyError)
_MASKED = ("sdpa", "eager")
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_WINDOWS = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size")
_SELECTED_KEYS = ("index_topk", "indexer_budget", "keep_window_size")
_CHANGING_ROPE = ("dynamic", "longrope")
_LAYERS = ("layer_types", "layers_block_type", "block_types")


@dataclass(frozen=True)
class Sharing:
    """The tokens of the ``longest`` row that several endings may share, 0 for none, and the ``reason`` of a limit."""

    longest: int
    reason: str | None = None


class Padding(NamedTuple):
    """Why rows may not be padded, if so, and whether the last block may leave out positions that are not scored."""

    obstacle: str | None
    trims: bool = False


def declared_sharing(model: Any, max_length: int) -> Sharing:
    """Return how long a row with a shared context may be on this model by its configuration; nothing is tried."""
    if max_length < SHORT_PATH:
        return Sharing(0, "its rows are too short for a probe")
    config = model.config.get_text_config()
    kinds = {str(kind) for name in _LAYERS for kind in (getattr(config, name, None) or ())} - _ATTENTION
    if getattr(model, "_is_stateful", False) or kinds:
        return Sharing(0, f"it has layers without a mask ({', '.join(sorted(kinds)) or 'recurrent'})")
    checks = (getattr(module, "reads_earlier_positions", None) for module in model.modules())  # an export has it, too
    if any(check() for check in checks if callable(check)):
        return Sharing(0, "a method of its patch reads earlier positions of the row")
    if getattr(config, "alibi", False):
        return Sharing(0, "ALiBi uses distances in the row")
    body = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    if "position_ids" not in inspect.signature(body.forward).parameters:
        return Sharing(0, "it takes no position ids")
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in _MASKED:
        return Sharing(0, f"attention {attention!r} takes no 4-D mask")
    window = min(_limits(model, _WINDOWS + _SELECTED_KEYS), default=max_length)
    return Sharing(window, f"attention covers {window} tokens") if window < max_length else Sharing(max_length)


def trees_are_exact(model: Any, parts: Parts, row: int, path: int) -> bool:
    """Return whether a row of so many tokens, its longest text of ``path``, gives the features of plain rows.

    Up to `SHORT` tokens and `SHORT_PATH` of a text that is tried on trees of two and three endings that share some of
    their tokens, in one row and side by side. Beyond that only a limit can make a difference, which one tree shows that
    is as long, in one text and in all.
    """
    equal = _equal_as_trees if row <= SHORT and path <= SHORT_PATH else partial(_equal_as_long_tree, row, path)
    try:
        return any(equal(model, parts, random_tokens(model, 1, max(row, SHORT_PATH), seed)[0]) for seed in _SEEDS)
    except _FAILURES:
        return False


def trial_of_trees(row: int, path: int, overhead: int) -> int:
    """Return what `trees_are_exact` costs at first, its short rows included, in tokens."""
    short = _SHORT_TOKENS + 2 * overhead
    return short if row <= SHORT and path <= SHORT_PATH else short + row + path + 2 * overhead


def try_padding(model: Any, parts: Parts, shortest: int, longest: int, modules: Modules = ()) -> Padding:
    """Return whether rows of ``shortest`` tokens on may be padded, or continued by other tokens, to the longest.

    Something may depend on the whole row: which of equal scores an indexer selects, rotary frequencies that switch at
    a length, attention that is not causal. A probe can miss ties and switches, so those are read from the
    configuration. The rest is tested on rows of the shortest length and of nearly the longest; one is followed by
    tokens, the other padded with zeros. Rounding alone can change a router's choice between near ties, so a row may
    differ as much as it does in a batch without padding, and one of three probes is enough.

    Those of ``modules`` that no hook watches compute scored positions only in the padded rows; where that is not exact,
    all positions are computed.
    """
    # what the configuration says
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one for each type of layer
    changing = [kind for kind in kinds if kind.get("rope_type") in _CHANGING_ROPE]
    originals = [kind.get("original_max_position_embeddings") for kind in changing]
    lengths = [*originals, config.max_position_embeddings] if changing else []
    if (keys := min(_limits(model, _SELECTED_KEYS), default=longest)) < longest:
        return Padding(f"its attention selects {keys} keys")
    if (original := min(filter(None, lengths), default=longest)) < longest:
        return Padding(f"its rotary frequencies change beyond {original} tokens")

    # the trials
    if longest == 1:
        return Padding(None)
    sizes = (min(max(2, shortest), longest - 1), longest - 1)  # rotary positions have no effect on one token
    trimmed = trimmable(modules)
    for skipping in [trimmed, ()] if trimmed else [()]:
        try:
            probes = (random_tokens(model, 2, longest, seed) for seed in _SEEDS)
            if any(_equal_padded(parts, skipping, probe, sizes) for probe in probes):
                return Padding(None, bool(skipping))
        except _FAILURES:
            continue
    return Padding("a probe failed or gave different numbers when they were padded")


def trial_of_padding(shortest: int, longest: int, overhead: int) -> int:
    """Return what `try_padding` costs in tokens."""
    return shortest + 3 * longest + 3 * overhead


def _limits(model: Any, names: Sequence[str]) -> list[int]:
    config = model.config.get_text_config()
    return [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0]


def random_tokens(model: Any, rows: int, size: int, seed: int = 0) -> Tensor:
    """Return tokens (rows, size), the same for the same seed."""
    words = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(words, (rows, size), generator=generator).to(input_device(model))


def _equal_padded(parts: Parts, modules: Sequence[nn.Module], tokens: Tensor, sizes: tuple[int, int]) -> bool:
    """Return whether rows of these sizes have the same features alone and padded; trimmed, at two of three places."""
    alone = [parts.features(tokens[row : row + 1, :size])[0, :size] for row, size in enumerate(sizes)]
    positions = [torch.arange(size, device=tokens.device) for size in sizes]
    if modules:
        positions = [kept_at[(kept_at % 3 != 1) | (len(kept_at) < 3)] for kept_at in positions]
    expected = torch.cat([row[nodes] for row, nodes in zip(alone, positions, strict=True)]).float()
    counts = torch.tensor([len(nodes) for nodes in positions], device=tokens.device)
    rows, nodes = torch.arange(2, device=tokens.device).repeat_interleave(counts), torch.cat(positions)
    padded = tokens.clone()
    padded[1, sizes[1] :] = 0
    with only_at(modules, rows, nodes, padded):
        features = parts.features(padded)[rows, nodes].float()
    if close(features, expected, alone[0].dtype):
        return True
    again = parts.features(tokens[1:, : sizes[1]].expand(2, -1))[0, : sizes[1]]
    rounding = (again - alone[1]).float().abs().max()
    return bool((features - expected).abs().max() <= 3 * rounding)


def _equal_as_trees(model: Any, parts: Parts, probe: Tensor) -> bool:
    """Return whether trees of two and three endings give the features of plain rows, in one row and side by side."""
    tokens = probe[:SHORT_PATH].tolist()
    context, others = tokens[:6], tokens[6:]
    endings = [others[:5], [*others[:2], *others[4:], *others[:2]], others[::-1]]
    pairs = [*((context, ending) for ending in endings), (others[:3], context[:3]), (others[:3], context[3:])]
    requests = [TokenRequest.cut(*pair, max_length=SHORT_PATH) for pair in pairs]
    first, second = group(requests, longest=4 * SHORT_PATH, endings=4 * SHORT_PATH)
    trees = [Tree.joined([first, second]), second]
    rows = [Tree.of(request.tokens) for request in requests]
    together = parts.features(**model_inputs(model, trees))
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


def _equal_as_long_tree(row: int, path: int, model: Any, parts: Parts, probe: Tensor) -> bool:
    """Return whether the last ending of a tree has the features that it has after its context alone.

    The context has half of the path's tokens; an ending before the last one takes up the rest of the row.
    """
    tokens = probe.tolist()
    context, last = tokens[: path // 2], tokens[path // 2 : path]
    tree = Tree.of(context)
    tree.add(0, len(context) - 1, tokens[::-1][: max(1, row - path)])
    tree.add(1, len(context) - 1, last)
    nodes = tree.scored[-1][1][1:]
    together = parts.features(**model_inputs(model, [tree]))[0]
    alone = parts.features(**model_inputs(model, [Tree.of([*context, *last])]))[0]
    return close(together[nodes].float(), alone[len(context) :].float(), model.dtype)
