"""Scoring many requests: grouped, batched, within the available memory."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch

from hfpatch.errors import HfpatchError, is_out_of_memory
from hfpatch.evaluation.scorer.batching import BatchLimits, Unit, batches, model_inputs, units
from hfpatch.evaluation.scorer.exactness import (
    SHORT,
    SHORT_PATH,
    Padding,
    Sharing,
    declared_sharing,
    random_tokens,
    trees_are_exact,
    trial_of_padding,
    trial_of_trees,
    try_padding,
)
from hfpatch.evaluation.scorer.head import BodyAndHead, Parts, WholeModel
from hfpatch.evaluation.scorer.log_probs import Score, Targets, score_positions
from hfpatch.evaluation.scorer.trees import TokenRequest, Tree, group, pack
from hfpatch.evaluation.scorer.trimming import Modules, behind_attention, only_at, trimmable
from hfpatch.sites import base_model, input_device
from hfpatch.sites.lm_head import find_lm_head

logger = logging.getLogger(__name__)

OnScores = Callable[[Sequence[tuple[int, Score]]], None]
Share = Callable[[Sequence[Unit], Collection[int]], Collection[int]]
"""Takes all units of work and the requests that are done, and returns the requests that other processes score."""

_PROBE_TOKENS = 16  # a NaN of broken weights shows in a short row, too
_FEWEST_TOKENS = 256  # smaller batches leave the device idle; not measured
_FEW_ROWS = 16  # for more, to read the head's weights for each costs more than to try it alone
_FEW_LOGITS = 1 << 24  # of a row


@dataclass(frozen=True)
class Plan:
    """How requests are scored.

    In ``batches`` of rows, by the model in two ``parts`` or as a whole, of which ``modules`` compute scored positions
    only; ``sharing`` is None where rows are scored one by one.
    """

    batches: list[list[Tree]]
    parts: Parts
    modules: Modules = ()
    sharing: Sharing | None = None


class Scorer:
    """Scores token requests on one model, in the state in which the scorer was built.

    Padding, trees and the separate head are tried on the model before they are used, see
    `hfpatch.evaluation.scorer.exactness`, and only where they save more than the trial costs. Scores depend on
    the requests and the limits alone, not on earlier trials.

    Args:
        model: a causal language model in evaluation mode, with adapters or without.
        max_length: the longest row that the model takes.
        limits: how much goes through the model at once; None takes the limits of the device.
        weigh_trials: False scores as in a job so large that trials cost nothing.

    Attributes:
        declared: how long a row with several endings may be by the model's configuration.
    """

    def __init__(
        self,
        model: Any,
        max_length: int,
        limits: BatchLimits | None = None,
        *,
        weigh_trials: bool = True,
    ) -> None:
        self.model = model
        self.limits = limits or BatchLimits.for_device(input_device(model))
        self.weigh_trials = weigh_trials
        self.declared = declared_sharing(model, max_length)
        self._max_length = max_length
        self._padding: dict[tuple[int, int], Padding] = {}  # by the shortest and the longest row
        self._exact_trees: dict[tuple[int, int], bool] = {}  # by the tokens of a row and of its longest text

    @cached_property
    @torch.no_grad()
    def parts(self) -> Parts:
        """The model as body and head, if together they give its logits, else as a whole."""
        lm_head = find_lm_head(self.model)
        if lm_head is None:
            self._warn("its head cannot be separated from its body; the logits of every position are computed")
            return WholeModel(self.model)
        return BodyAndHead(lm_head.body, lm_head.head, lm_head.tail)

    @cached_property
    def _behind_attention(self) -> Modules:
        return behind_attention(self.model, self.parts)

    @torch.no_grad()
    def score(
        self,
        requests: Sequence[TokenRequest],
        on_scores: OnScores,
        *,
        scored: Collection[int] = (),
        share: Share | None = None,
    ) -> None:
        """Score requests, and pass on the scores of each unit of batches as soon as they are there.

        Args:
            requests: the requests; the batches depend on all of them, including those of ``scored``.
            on_scores: called with the index and the score of each request in a unit.
            scored: indices of requests that have a score already; a batch of such requests alone is skipped.
            share: shares the units out among several processes; it is called once, also where memory is too small.

        Raises:
            HfpatchError: if a quarter of the limits is too much for the memory, too.
        """
        done = set(scored)
        quarter = replace(self.limits, tokens=max(1, self.limits.tokens // 4), logits=max(1, self.limits.logits // 4))
        shorter = replace(self.declared, longest=min(self.declared.longest, quarter.tokens))
        for limits, sharing in ((self.limits, self.declared), (quarter, shorter)):
            try:
                plan = self.plan(requests, limits, sharing)
                waiting = units(plan.batches, limits, together=not isinstance(plan.parts, WholeModel))
                if share is not None:
                    done.update(share(waiting, done))
                    share = None
                for unit in waiting:
                    if features := [self._features(plan, batch, requests) for batch in unit.missing(done)]:
                        scores = score_positions(plan.parts, features, limits)
                        done.update(index for index, _ in scores)
                        on_scores(scores)
                return
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if limits is not self.limits:
                    raise HfpatchError(
                        f"out of memory, even with {limits.tokens} tokens at once; reduce token_budget or max_length, "
                        "use a smaller dtype, or more memory (nothing scored so far is lost)"
                    ) from error
                logger.warning("out of memory with %s tokens at once; trying a quarter", limits.tokens)
            if input_device(self.model).type == "cuda":
                torch.cuda.empty_cache()

    def _features(
        self, plan: Plan, batch: Sequence[Tree], requests: Sequence[TokenRequest]
    ) -> tuple[torch.Tensor, Targets]:
        """Return the features (n, width) of a batch's scored positions and the targets that they predict.

        A position that is alone comes twice: the rounding of MKL's product of one row depends on where in memory the
        weights begin, which differs between processes.
        """
        inputs = model_inputs(self.model, batch)
        wanted = sorted(
            (row, node, target, index)
            for row, tree in enumerate(batch)
            for index, nodes in tree.scored
            for node, target in zip(nodes, requests[index].targets, strict=True)
        )
        table = np.array(wanted, dtype=np.int64)
        positions, at = np.unique(table[:, :2], axis=0, return_inverse=True)  # each row and node once
        targets = np.column_stack([at.reshape(-1), table[:, 2:]])
        if len(positions) == 1:
            positions = positions.repeat(2, axis=0)
        rows, nodes = torch.from_numpy(positions).to(inputs["tokens"].device).unbind(1)
        with only_at(plan.modules, rows, nodes, inputs["tokens"]):
            features = plan.parts.features(**inputs)
        left_out = inputs["tokens"].shape[1] - features.shape[1]
        return features[rows, nodes - left_out], targets

    @torch.no_grad()
    def plan(self, requests: Sequence[TokenRequest], limits: BatchLimits, sharing: Sharing | None = None) -> Plan:
        """Return how the requests are scored; ``sharing`` is how long a row with several endings may be, as declared.

        There are three ways, each with the trials that it needs: rows one by one, which needs none; plain rows in
        padded batches; contexts with several endings in one row. The one with the fewest tokens, trials included, is
        chosen.
        """
        by_tokens: dict[tuple[int, ...], Tree] = {}
        for index, request in enumerate(requests):
            row = by_tokens.setdefault(request.tokens, Tree.of(request.tokens))
            row.scored.append((index, list(range(len(row) - len(request.targets), len(row)))))
        rows = sorted(by_tokens.values(), key=lambda row: (-len(row), row.tokens))
        if not rows:
            return Plan([], self.parts)
        alone = [[row] for row in rows]
        longest = len(rows[0])
        shortest = min(longest - 1, len(rows[-1]))

        # the cost of each way, in tokens
        batched = cache(partial(_batched, requests))  # takes as long as a small model's forward pass on a GPU
        contexts = {request.context for request in requests}
        in_common = len(contexts) < len({(request.context, request.tokens) for request in requests})
        overhead, sharing = limits.overhead, sharing or self.declared
        plain, shared = (batched(way, limits) for way in (Sharing(0), sharing if in_common else Sharing(0)))
        largest, path = _sizes(shared)
        padding = trial_of_padding(shortest, longest, overhead) if self.weigh_trials else 0
        trees = trial_of_trees(largest, path, overhead) if self.weigh_trials else 0
        cost_alone, cost_plain, cost_shared = (
            sum(len(batch) * max(map(len, batch)) + overhead for batch in made) for made in (alone, plain, shared)
        )
        cost_plain += padding
        cost_shared = cost_shared + padding + trees if largest else cost_plain
        if cost_shared >= min(cost_plain, cost_alone) and self.declared.reason and in_common:
            warn_once(f"{type(self.model).__name__}: {_limit_of(self.declared)}")
        words = self.model.get_input_embeddings().weight.shape[0]
        if cost_alone <= min(cost_plain, cost_shared):  # if rows are few, without a trial of the head
            last = max(2, *(len(request.targets) for request in requests))  # the product of one may round otherwise
            few = self.weigh_trials and len(rows) <= _FEW_ROWS and last * words <= _FEW_LOGITS
            chooses = few and "logits_to_keep" in inspect.signature(base_model(self.model).forward).parameters
            return Plan(alone, WholeModel(self.model, last) if chooses else self.parts)

        # the trials
        if (shortest, longest) not in self._padding:
            tried = try_padding(self.model, self.parts, shortest, longest, self._behind_attention)
            self._padding[shortest, longest] = tried
        padded = self._padding[shortest, longest]
        if padded.obstacle is not None:
            self._warn(f"rows of {shortest} to {longest} tokens are scored one by one ({padded.obstacle})")
            return Plan(alone, self.parts)
        modules = trimmable(self._behind_attention) if padded.trims else ()
        if isinstance(self.parts, WholeModel):  # each position has a row of logits
            limits = replace(limits, tokens=min(limits.tokens, max(_FEWEST_TOKENS, limits.logits // words)))
        if cost_shared >= cost_plain:
            return Plan(batched(Sharing(0), limits), self.parts, modules, Sharing(0))
        sharing, made = self._try_trees(lambda way: batched(way, limits), sharing)
        return Plan(made, self.parts, modules, sharing)

    def _try_trees(
        self, batched: Callable[[Sharing], list[list[Tree]]], sharing: Sharing
    ) -> tuple[Sharing, list[list[Tree]]]:
        """Return how long a row with several endings may be, tried on the largest such row, and the batches."""
        if not self._is_tree_exact(SHORT, SHORT_PATH):
            sharing = Sharing(0, "a probe failed or gave different numbers")
        made = batched(sharing)
        row, path = _sizes(made)
        while row and not self._is_tree_exact(row, path):
            shorter = row // 2 if row // 2 >= SHORT else 0
            sharing = Sharing(shorter, f"a probe of {row} tokens failed or gave different numbers")
            made = batched(sharing)
            row, path = _sizes(made)
        if sharing.reason is not None:
            self._warn(_limit_of(sharing))
        return sharing, made

    def _is_tree_exact(self, row: int, path: int) -> bool:
        size = (SHORT, SHORT_PATH) if row <= SHORT and path <= SHORT_PATH else (row, path)
        if size not in self._exact_trees:
            self._exact_trees[size] = trees_are_exact(self.model, self.parts, *size)
        return self._exact_trees[size]

    def _warn(self, limit: str) -> None:
        if self._is_finite:
            warn_once(f"{type(self.model).__name__}: {limit}")

    @cached_property
    def _is_finite(self) -> bool:
        """Whether the model gives numbers; of one that does not, trials mean nothing."""
        logits: torch.Tensor = self.model(random_tokens(self.model, 1, min(_PROBE_TOKENS, self._max_length))).logits
        return not bool(logits.isnan().any())


def _batched(requests: Sequence[TokenRequest], sharing: Sharing, limits: BatchLimits) -> list[list[Tree]]:
    """Return batches of rows in which endings share their context where they may."""
    rows = pack(group(requests, longest=sharing.longest, endings=limits.tokens), min(sharing.longest, limits.tokens))
    return batches(rows, limits.divided(sum(map(len, rows))))


def _sizes(made: Sequence[Sequence[Tree]]) -> tuple[int, int]:
    """Return the tokens of the largest row that is no plain one, and of the longest text in such rows; 0 for none."""
    trees = [tree for batch in made for tree in batch if not tree.is_chain]
    return max(map(len, trees), default=0), max((max(tree.depths) + 1 for tree in trees), default=0)


def _limit_of(sharing: Sharing) -> str:
    if sharing.longest == 0:
        return f"endings do not share their context ({sharing.reason}); plain rows are scored"
    return f"endings share their context only in rows of up to {sharing.longest} tokens ({sharing.reason})"


@cache
def warn_once(text: str) -> None:
    """Log a warning, but not again."""
    logger.warning("%s", text)
