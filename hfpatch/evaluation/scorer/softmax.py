"""The log-softmax at a few places, without the logits of a whole vocabulary ever standing side by side for long."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hfpatch.evaluation.scorer.head import BodyAndHead, Parts

_NEAR = 1e-5


@dataclass(frozen=True)
class Targets:
    """What is asked of some rows of features.

    Attributes:
        rows: (targets,), the row of each target.
        tokens: (targets,), the target tokens.
    """

    rows: Tensor
    tokens: Tensor


def log_probabilities(parts: Parts, features: Tensor, targets: Targets, numbers: int) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability (targets,) in fp32 and whether it is the greedy token.

    The greedy token is lm-eval's, the arg max of a row's log-probabilities: rounding makes log-probabilities equal
    where logits are not quite, and of equal ones the first counts.

    Args:
        parts: the model in two steps.
        features: (n, width).
        targets: what is asked of them.
        numbers: how many logits may exist at once, roughly.
    """
    if isinstance(parts, BodyAndHead) and parts.sliceable(features):
        return _by_slices(parts, features, targets, numbers)
    return from_logits(parts.logits(features), targets)


def from_logits(logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and greedy decisions from logits (n, vocabulary) in fp32, which are overwritten."""
    rows, tokens = targets.rows, targets.tokens
    top = logits.amax(dim=-1)
    wanted, highest = logits[rows, tokens], top[rows]
    greedy = _reaches(wanted, highest)
    (near,) = greedy.nonzero(as_tuple=True)
    if len(near):
        greedy[near] = logits[rows[near]].log_softmax(dim=-1).argmax(dim=-1) == tokens[near]
    total = logits.sub_(top[:, None]).exp_().sum(dim=-1).log()
    return (wanted - highest) - total[rows], greedy


def _by_slices(parts: BodyAndHead, features: Tensor, targets: Targets, numbers: int) -> tuple[Tensor, Tensor]:
    """Go through the vocabulary slice by slice, which keeps each slice's logits in the processor's cache.

    Running over the slices: the largest logit ``m`` of each row, ``s = Σ exp(logit - m)`` and the second largest of the
    slices' peaks. A target is the greedy token where its logit reaches ``m`` and no other one comes near: neither in
    its own slice, where those near it are counted, nor in another, whose peak the second largest bounds. All these
    logits are of one product, so that its precision (TF32, bf16) does not matter. Where others come near,
    `from_logits` decides.
    """
    rows, tokens = targets.rows, targets.tokens
    top = torch.full((len(features),), torch.finfo(torch.float32).min, device=features.device)
    runner_up, total = top.clone(), torch.zeros_like(top)
    wanted = torch.zeros(len(tokens), device=features.device)
    rivals = torch.full_like(tokens, 2)
    for start, logits in parts.slices(features, numbers):
        peak = logits.amax(dim=-1)
        (here,) = ((tokens >= start) & (tokens < start + logits.shape[1])).nonzero(as_tuple=True)
        wanted[here] = logits[rows[here], tokens[here] - start]
        near = here[_reaches(wanted[here], torch.maximum(peak, top)[rows[here]])]
        rivals[near] = _reaches(logits[rows[near]], wanted[near, None]).sum(dim=-1)
        higher = torch.maximum(top, peak)
        runner_up = torch.maximum(runner_up, torch.minimum(top, peak))
        total = total * (top - higher).exp() + logits.sub_(higher[:, None]).exp_().sum(dim=-1)
        top = higher
    greedy = _reaches(wanted, top[rows])
    (unclear,) = (greedy & ((rivals > 1) | _reaches(runner_up[rows], wanted))).nonzero(as_tuple=True)
    for some in torch.split(unclear, max(1, numbers // parts.vocabulary)):
        again = Targets(torch.arange(len(some), device=rows.device), tokens[some])
        greedy[some] = from_logits(parts.logits(features[rows[some]]), again)[1]
    return (wanted - top[rows]) - total.log()[rows], greedy


def _reaches(logits: Tensor, others: Tensor) -> Tensor:
    """Return where logits are as large as others, up to what rounding to a log-probability hides."""
    return logits >= others - _NEAR * (1 + others.abs())
