"""Attention weights of every head on text: on the first token, over how many tokens, and how far back.

Means of the weights a_ij of query i on the keys j <= i of its document, over all queries but a document's first, which
sees only itself:

    sink      a_i0, the weight on the document's first token (StreamingLLM, arXiv 2309.17453)
    entropy   −Σ_j a_ij ln a_ij in nats: exp of it is the number of keys that would have equal weights
    distance  Σ_j a_ij (i − j) in tokens
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.analysis.running import Batch, Tokens, run
from hfpatch.errors import HfpatchError
from hfpatch.sites import base_model, find_sites
from hfpatch.support.modes import hooked
from hfpatch.tuners.hidden_state import argument_names


@dataclass(frozen=True)
class HeadAttention:
    """The means of one head of a block: sink from 0 to 1, entropy in nats, distance in tokens."""

    layer: int
    head: int
    sink: float
    entropy: float
    distance: float


def head_attention(model: nn.Module, batches: Iterable[Batch]) -> list[HeadAttention]:
    """Run a model on batches and return the attention of each head, first layer first.

    The model's mode, hooks and attention implementation are left as they were.

    Raises:
        HfpatchError: if the model cannot compute attention so that its weights are known.
    """
    sums: dict[int, Tensor] = {}  # (heads, 3)
    queries: dict[int, int] = {}
    begun: list[Tokens] = []  # of each batch

    def read(layer: int, module: nn.Module, args: Any, output: Any) -> None:
        tokens = begun[-1]
        rows, length = tokens.counted.shape
        tensors = [t for t in output if isinstance(t, Tensor)] if isinstance(output, tuple | list) else []
        square = [t for t in tensors if t.dim() == 4 and t.shape[::2] == (rows, length) == t.shape[::3]]
        if not square:
            raise HfpatchError(f"layer {layer}: {type(module).__name__} does not return its attention weights")
        weights = square[0].detach().cpu().double() * tokens.pairs.cpu()[:, None]  # (batch, heads, seq, seq)
        positions = tokens.positions.cpu().double()
        first = (positions == 0).double()[:, None, None]
        back = (positions[:, :, None] - positions[:, None, :])[:, None]
        entropy = torch.special.entr(weights)
        measured = torch.stack([(weights * first).sum(-1), entropy.sum(-1), (weights * back).sum(-1)], dim=-1)
        of_queries = measured.movedim(1, -1)[tokens.counted & (tokens.positions > 0)]  # (queries, 3, heads)
        sums[layer] = sums.get(layer, torch.zeros(1)) + of_queries.sum(0).T
        queries[layer] = queries.get(layer, 0) + len(of_queries)

    handles = []
    for site in find_sites(model):
        handles.append(site.attention.register_forward_hook(partial(read, site.layer)))
        if (asked := "output_attentions") in (names := argument_names(site.attention)):  # Falcon returns them if asked
            at = names.index(asked)

            def ask(module: nn.Module, args: Any, kwargs: Any, at: int = at) -> Any:
                if len(args) > at:
                    return (*args[:at], True, *args[at + 1 :]), kwargs
                return args, {**kwargs, asked: True}

            handles.append(site.attention.register_forward_pre_hook(ask, with_kwargs=True))
    base: Any = base_model(model)
    implementation = base.config._attn_implementation
    with hooked(handles):
        try:
            base.set_attn_implementation("eager")
        except (ValueError, AttributeError) as error:
            raise HfpatchError(f"{type(base).__name__} cannot compute attention step by step") from error
        try:
            run(model, batches, begun.append)
        finally:
            base.set_attn_implementation(implementation)
    means = {layer: sums[layer] / queries[layer] for layer in sorted(sums)}
    return [
        HeadAttention(layer, head, *map(float, row)) for layer, mean in means.items() for head, row in enumerate(mean)
    ]
