"""Diagnostics of a run: how many updates survive rounding, and how large f of each query path is beside its anchor."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.analysis.running import TokenMeans, norm_ratio, tokens_of
from hfpatch.data.blocks import IGNORE, TokenBlocks
from hfpatch.models.paths import PathOutput, observed
from hfpatch.results.layout import Diagnostic
from hfpatch.support.modes import hooked
from hfpatch.training.head import loss_in_forward
from hfpatch.training.records import JsonLines
from hfpatch.training.sharding import whole
from hfpatch.training.validation import mean_loss
from hfpatch.tuners.adapters import block_of, tensor_group

MEASUREMENTS = 8
"""How many steps update survival is measured at, each with a copy of the trained weights."""
DIAGNOSED_BLOCKS = 8
"""How many of the evaluation blocks, the first ones, are measured on."""


def survival_steps(*, steps: int, warmup_steps: int) -> frozenset[int]:
    """Return the steps (from 0) to measure: the first after warm-up, and up to eight spread evenly from there."""
    first = min(warmup_steps, steps - 1)
    stride = max(1, (steps - first) // MEASUREMENTS)
    return frozenset(range(first, steps, stride)[:MEASUREMENTS])


@contextlib.contextmanager
def counting_survival(
    counts: dict[str, tuple[int, int]], parameters: Mapping[str, torch.nn.Parameter]
) -> Iterator[None]:
    """Count, over the optimiser's step inside, the weights with a non-zero gradient and how many of them changed.

    A weight survives when it differs, in its own dtype, before and after the step. Low precision rounds small
    updates away: bfloat16 keeps 8 bits, so it loses any below about 1/256 to 1/512 of the weight. Weights without a
    gradient (LoRA's A at the first step, say) are not counted. ``counts``, group -> (changed, with gradient), is
    updated in place.
    """
    before = {
        name: (whole(parameter.detach()).clone(), whole(parameter.grad) != 0)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    yield
    counted: defaultdict[tuple[str, torch.device], list[torch.Tensor]] = defaultdict(list)
    for name, (old, moved) in before.items():
        changed = (whole(parameters[name].detach()) != old) & moved
        counted[tensor_group(name), moved.device].append(torch.stack([changed.sum(), moved.sum()]))
    for (group, _), sums in counted.items():  # one wait for a GPU a group, not two a tensor
        changed_sum, moved_sum = torch.stack(sums).sum(0).tolist()
        earlier = counts.get(group, (0, 0))
        counts[group] = (earlier[0] + changed_sum, earlier[1] + moved_sum)


def survival_shares(counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Return changed / with gradient by group, and for ``all`` together; groups without gradient are left out."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for group, (changed, moved) in counts.items():
        for name in (group, "all"):
            totals[name][0] += changed
            totals[name][1] += moved
    return {name: changed / moved for name, (changed, moved) in totals.items() if moved}


class DiagnosticsFile(JsonLines):
    """diagnostics.jsonl: a line for each layer and target, step by step."""

    def truncate(self, step: int, expected: set[int]) -> None:
        """Drop the lines after ``step``; before the first step, all.

        Raises:
            HfpatchError: if the steps left are not the ``expected`` ones, each with as many lines.
        """
        self.drop_after(step, lambda steps: set(steps) == expected and len(set(Counter(steps).values())) <= 1)


def diagnose(
    model: nn.Module, blocks: TokenBlocks, *, step: int, batch_size: int, autocast: str | None = None
) -> list[Diagnostic]:
    """Run a model on the first evaluation blocks and return what its query paths compute, first layer first.

    Weights, mode and generators are left as they were, so training continues as without it. Where processes share the
    weights, all must call it. The model is from :func:`hfpatch.models.build_scratch`, ``step`` the optimiser steps
    done. Padding is not counted.
    """
    means = TokenMeans[tuple[int, str]]()

    def begin(module: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> None:
        """Let the mask end with the last predicted token: the tokens that fill a row up are not predicted."""
        predicted = (batch["labels"] != IGNORE).long()
        means.begin(tokens_of({**batch, "attention_mask": predicted.flip(-1).cummax(-1).values.flip(-1)}))

    def add(output: PathOutput) -> None:
        f, anchor = output.f.float(), output.anchor.float()
        numbers = [norm_ratio(f, anchor), F.cosine_similarity(f, anchor, dim=-1), norm_ratio(f, output.x)]
        means.add((block_of(output.at), output.target), torch.stack(numbers, dim=-1))

    with contextlib.ExitStack() as stack:
        stack.enter_context(loss_in_forward(model))  # which runs the model, too
        stack.enter_context(observed(model, add))
        stack.enter_context(hooked([model.register_forward_pre_hook(begin, with_kwargs=True)]))
        mean_loss(model, blocks.head(DIAGNOSED_BLOCKS), batch_size=batch_size, autocast=autocast)
    return [
        Diagnostic(step=step, layer=layer, target=target, size=size, cosine=cosine, size_beside_x=size_beside_x)
        for (layer, target), (size, cosine, size_beside_x) in sorted(means.overall().items())
    ]
