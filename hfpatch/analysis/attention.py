"""Attention weights of every head on text: on the first token, over how many tokens, and how far back.

Means of the weights a_ij of query i on the keys j <= i of its document, over all queries but a document's first, which
sees only itself:

    sink      a_i0, the weight on the document's first token (StreamingLLM, arXiv 2309.17453)
    entropy   −Σ_j a_ij ln a_ij in nats: exp of it is the number of keys that would have equal weights
    distance  Σ_j a_ij (i − j) in tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.analysis.running import Batch, Tokens, run, tokens_of
from hfpatch.errors import HfpatchError
from hfpatch.sites import base_model, find_sites
from hfpatch.support.modes import hooked


@dataclass(frozen=True)
class HeadAttention:
    """The attention weights of one head on text.

    Attributes:
        layer: index of the block.
        head: index of the query head.
        sink: the mean weight on the first token of the document, from 0 to 1.
        entropy: of the weights, in nats.
        distance: how many tokens back they lie.
    """

    layer: int
    head: int
    sink: float
    entropy: float
    distance: float


def head_attention(model: nn.Module, batches: Iterable[Batch]) -> list[HeadAttention]:
    """Run a model on batches and return the attention of each head, first layer first.

    Args:
        model: patched or not; its mode, hooks and way of computing attention are left as they were.
        batches: see :data:`hfpatch.analysis.running.Batch`.

    Raises:
        HfpatchError: if the model cannot compute attention so that its weights are known.
    """
    now: dict[str, Tokens] = {}
    sums: dict[int, Tensor] = {}  # (heads, 3)
    queries: dict[int, int] = {}

    def begin(batch: Batch) -> None:
        now["tokens"] = tokens_of(batch)

    def read(layer: int, module: nn.Module, args: Any, output: Any) -> None:
        tokens = now["tokens"]
        weights = _weights(output, tokens)
        if weights is None:
            raise HfpatchError(f"layer {layer}: {type(module).__name__} does not return its attention weights")
        chosen = tokens.counted & (tokens.positions > 0)
        found = _of_queries(weights.detach().cpu().double(), tokens).movedim(1, -1)[chosen]  # (queries, 3, heads)
        sums[layer] = sums.get(layer, torch.zeros(1)) + found.sum(0).T
        queries[layer] = queries.get(layer, 0) + len(found)

    handles = []
    for site in find_sites(model):
        handles.append(site.attention.register_forward_hook(partial(read, site.layer)))
        if "output_attentions" in signature(site.attention.forward).parameters:  # Falcon's returns them only if asked
            handles.append(site.attention.register_forward_pre_hook(_ask, with_kwargs=True))
    with hooked(handles), _eagerly(model):
        run(model, batches, begin)
    means = {layer: sums[layer] / queries[layer] for layer in sorted(sums)}
    return [
        HeadAttention(layer, head, *map(float, row)) for layer, mean in means.items() for head, row in enumerate(mean)
    ]


def _ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "output_attentions": True}


def _of_queries(weights: Tensor, tokens: Tokens) -> Tensor:
    """Return sink, entropy and distance of each query, ``(batch, heads, seq, 3)``."""
    weights = weights * tokens.pairs.cpu()[:, None]
    positions = tokens.positions.cpu().double()
    first = (positions == 0).double()[:, None, None]
    back = (positions[:, :, None] - positions[:, None, :])[:, None]
    entropy = torch.special.entr(weights)
    return torch.stack([(weights * first).sum(-1), entropy.sum(-1), (weights * back).sum(-1)], dim=-1)


def _weights(output: Any, tokens: Tokens) -> Tensor | None:
    """Return the weights ``(batch, heads, seq, seq)`` among the outputs of an attention module."""
    rows, length = tokens.counted.shape
    for each in output if isinstance(output, tuple | list) else ():
        if isinstance(each, Tensor) and each.dim() == 4 and each.shape[::2] == (rows, length) == each.shape[::3]:
            return each
    return None


@contextmanager
def _eagerly(model: nn.Module) -> Iterator[None]:
    """Let a model compute attention step by step, so that its weights are known; as before at the end."""
    base: Any = base_model(model)
    before = base.config._attn_implementation
    try:
        base.set_attn_implementation("eager")
    except (ValueError, AttributeError) as error:
        raise HfpatchError(f"{type(base).__name__} cannot compute attention step by step") from error
    try:
        yield
    finally:
        base.set_attn_implementation(before)
