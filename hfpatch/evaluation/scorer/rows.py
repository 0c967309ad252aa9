"""One batch of rows through the model: the log-likelihood of each request and whether it is the greedy choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfpatch.evaluation.scorer.grouping import TokenRequest, Tree
from hfpatch.evaluation.scorer.head import Parts
from hfpatch.evaluation.scorer.inputs import model_inputs

Answer = tuple[float, bool]

_NEAR = 1e-5


@dataclass(frozen=True)
class _Asked:
    """What a batch is asked: scored positions, and the targets at them.

    Attributes:
        places: (positions, 2), the row and the node of each scored position, each once.
        at: (targets,), the index into ``places`` of each target, ascending.
        targets: (targets,), the target tokens.
        requests: (targets,), the request that each target belongs to.
    """

    places: Tensor
    at: Tensor
    targets: Tensor
    requests: Tensor


@torch.no_grad()
def score_batch(
    model: Any, parts: Parts, trees: Sequence[Tree], requests: Sequence[TokenRequest], logits: int
) -> Iterator[tuple[int, Answer]]:
    """Yield the index and the answer of each request in a batch of rows.

    Args:
        model: where the parts come from.
        parts: the model in two steps.
        trees: the rows.
        requests: what ``trees`` were made of.
        logits: rows of logits to make at once.
    """
    asked = _collect(trees, requests)
    features = parts.features(**model_inputs(model, trees))
    rows, nodes = asked.places.to(features.device).unbind(1)
    values, greedy = _score_places(parts, features[rows, nodes], asked, logits)
    sums, all_greedy = _per_request(asked.requests, values, greedy)
    for index in sorted(sums):
        yield index, (sums[index], all_greedy[index])


def _collect(trees: Sequence[Tree], requests: Sequence[TokenRequest]) -> _Asked:
    wanted = sorted(
        (row, node, target, index)
        for row, tree in enumerate(trees)
        for index, nodes in tree.scored
        for node, target in zip(nodes, requests[index].targets, strict=True)
    )
    table = np.array(wanted, dtype=np.int64)
    places, at = np.unique(table[:, :2], axis=0, return_inverse=True)
    columns = (places, at.reshape(-1), table[:, 2], table[:, 3])
    return _Asked(*(torch.from_numpy(np.ascontiguousarray(column)) for column in columns))


def _score_places(parts: Parts, features: Tensor, asked: _Asked, logits: int) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability (targets,) and whether it is the greedy token, some positions at a time."""
    values, greedy = [], []
    for start in range(0, len(features), logits):
        first, last = np.searchsorted(asked.at.numpy(), [start, start + logits])
        at, targets = (each[first:last].to(features.device) for each in (asked.at, asked.targets))
        found = log_probabilities(parts.logits(features[start : start + logits]), at - start, targets)
        values.append(found[0].cpu())
        greedy.append(found[1].cpu())
    return torch.cat(values), torch.cat(greedy)


def log_probabilities(logits: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-softmax at some places, and whether the target there is the arg max of the row's log-softmax.

    Args:
        logits: (n, vocabulary) in fp32; overwritten.
        rows: (targets,), the row of each target.
        targets: (targets,), the token of each target.

    Rounding makes log-probabilities equal where logits are not quite; a greedy decision between such is lm-eval's,
    which takes the arg max of the log-probabilities.
    """
    top = logits.amax(dim=-1)
    wanted, highest = logits[rows, targets], top[rows]
    greedy = wanted >= highest - _NEAR * (1 + highest.abs())
    (near,) = greedy.nonzero(as_tuple=True)
    if len(near):
        greedy[near] = logits[rows[near]].log_softmax(dim=-1).argmax(dim=-1) == targets[near]
    total = logits.sub_(top[:, None]).exp_().sum(dim=-1).log()
    return (wanted - highest) - total[rows], greedy


def _per_request(requests: Tensor, values: Tensor, greedy: Tensor) -> tuple[dict[int, float], dict[int, bool]]:
    sums: dict[int, float] = {}
    all_greedy: dict[int, bool] = {}
    for index, value, is_greedy in zip(requests.tolist(), values.tolist(), greedy.tolist(), strict=True):
        sums[index] = sums.get(index, 0.0) + value
        all_greedy[index] = all_greedy.get(index, True) and is_greedy
    return sums, all_greedy
