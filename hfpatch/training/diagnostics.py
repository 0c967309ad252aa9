"""Diagnostics of a pretraining run: how large f of each query path is beside its anchor, step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.analysis.running import TokenMeans, norm_ratio
from hfpatch.data.blocks import IGNORE, TokenBlocks
from hfpatch.models.paths import PathOutput, observed
from hfpatch.training.head import loss_in_forward
from hfpatch.training.records import JsonLines, as_json
from hfpatch.training.validation import mean_loss
from hfpatch.tuners.adapters import block_of

DIAGNOSED_BLOCKS = 8
"""How many of the evaluation blocks, the first ones, are measured on."""


@dataclass(frozen=True)
class QueryDiagnostic:
    """f of one query path after so many steps; one line of diagnostics.jsonl.

    Attributes:
        step: optimiser steps done.
        layer: index of the block.
        target: ``query``, ``key`` or ``value``.
        size: ‖f(x)‖ / ‖A(x)‖, the mean over tokens. A is what f is added to: x for an identity anchor, so that this is
            ‖f(x)‖ / ‖x‖, and x W_Q for a weight anchor. f of a residual path Q = x + xW is xW.
        cosine: the cosine between f(x) and A(x), the mean over tokens; 0 where one of them is 0.
        size_beside_x: ‖f(x)‖ / ‖x‖, the mean over tokens, whatever the anchor.
    """

    step: int
    layer: int
    target: str
    size: float
    cosine: float
    size_beside_x: float

    def to_json(self) -> dict[str, Any]:
        """Return the line; what is not finite is null."""
        return as_json(asdict(self))


class DiagnosticsFile(JsonLines):
    """diagnostics.jsonl: a line for each layer and target, step by step."""

    def append(self, found: list[QueryDiagnostic]) -> None:
        """Write what was found at one step."""
        self.write([each.to_json() for each in found])

    def truncate(self, step: int, expected: set[int]) -> None:
        """Drop what was written after ``step``; before the first step, everything.

        Raises:
            HfpatchError: if the steps left are not the ``expected`` ones, each with as many lines.
        """
        lines = Counter(value["step"] for value in self.values_until(step))
        if lines.keys() != expected or len(set(lines.values())) > 1:
            raise self.incomplete(step)
        if self.path.exists():
            self.keep(step)


def diagnose(
    model: nn.Module, blocks: TokenBlocks, *, step: int, batch_size: int, autocast: str | None = None
) -> list[QueryDiagnostic]:
    """Run a model on the first evaluation blocks and return what its query paths compute, first layer first.

    Weights, mode and generators are left as they were, so training continues as without it. Where weights lie in pieces
    on several processes, all of them must call it.

    The model is from :func:`hfpatch.models.build_scratch`, ``step`` the optimiser steps done. Padding is not counted.
    """
    means = TokenMeans[tuple[int, str]]()

    def begin(module: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> None:
        """Let the mask end with the last token that is predicted, as what fills up a row never is."""
        predicted = (batch["labels"] != IGNORE).long()
        means.begin({**batch, "attention_mask": predicted.flip(-1).cummax(-1).values.flip(-1)})

    def add(heard: PathOutput) -> None:
        f, anchor = heard.f.float(), heard.anchor.float()
        numbers = [norm_ratio(f, anchor), F.cosine_similarity(f, anchor, dim=-1), norm_ratio(f, heard.x)]
        means.add((block_of(heard.at), heard.target), torch.stack(numbers, dim=-1))

    with loss_in_forward(model), observed(model, add):  # the first runs the model too
        handle = model.register_forward_pre_hook(begin, with_kwargs=True)
        try:
            mean_loss(model, blocks.head(DIAGNOSED_BLOCKS), batch_size=batch_size, autocast=autocast)
        finally:
            handle.remove()
    return [QueryDiagnostic(step, *key, *means.mean(key)) for key in sorted(means.seen())]
