"""Scoring many requests: grouped, batched, within the memory that there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer.batching import BatchLimits, Unit, batches, model_inputs, units
from hfpatch.evaluation.scorer.exactness import (
    SHORT,
    Sharing,
    find_sharing,
    padding_obstacle,
    random_tokens,
    trees_are_exact,
)
from hfpatch.evaluation.scorer.head import Parts, WholeModel, split_model
from hfpatch.evaluation.scorer.log_probs import Pool, Score, Table, scored_positions
from hfpatch.evaluation.scorer.trees import TokenRequest, Tree, group, pack, plain_rows
from hfpatch.evaluation.scorer.trimming import Modules, find_trimmable, only_at
from hfpatch.sites import input_device

logger = logging.getLogger(__name__)

OnScores = Callable[[Sequence[tuple[int, Score]]], None]
Share = Callable[[Sequence[Unit], Collection[int]], Collection[int]]
"""Takes all units of work and the requests that are done, and returns the requests that other processes score."""

_PROBE_TOKENS = 16
_FEWEST_TOKENS = 256


class Scorer:
    """Scores token requests on one model, in the state in which the scorer was built.

    Args:
        model: a causal language model in evaluation mode, with adapters or without.
        max_length: the longest row that the model takes.
        limits: how much goes through the model at once; None takes the limits of the device.
    """

    def __init__(self, model: Any, max_length: int, limits: BatchLimits | None = None) -> None:
        self.model = model
        self.limits = limits or BatchLimits.for_device(input_device(model))
        with torch.no_grad():
            probe = random_tokens(model, 1, min(_PROBE_TOKENS, max_length))
            self.parts: Parts = split_model(model)
            finite = not self.parts.features(probe).isnan().any()
            self.trimmable: Modules = find_trimmable(model, self.parts, probe)
            self.sharing: Sharing = (
                find_sharing(model, self.parts, max_length)
                if max_length >= _PROBE_TOKENS
                else Sharing(0, "its rows are too short for a probe")
            )
        self._finite = finite  # a probe of a model that gives NaN means nothing
        self._padded: dict[tuple[int, int], str | None] = {}
        self._shared = SHORT
        if isinstance(self.parts, WholeModel):
            self._warn("its head cannot be separated from its body; the logits of every position are computed")
        self._warn_of_sharing()

    def score(
        self,
        requests: Sequence[TokenRequest],
        on_scores: OnScores,
        *,
        known: Collection[int] = (),
        share: Share | None = None,
    ) -> None:
        """Score requests, and pass on the scores of each unit of batches as soon as they are known.

        Args:
            requests: what to score; the batches depend on all of them, including known ones.
            on_scores: called with the index and the score of each request in a unit.
            known: indices of requests that need no score; a batch of such requests alone is skipped.
            share: shares the units out among several processes; it is called once, also where memory is too small.

        Raises:
            HfpatchError: if a quarter of the limits is too much for the memory, too.
        """
        done = set(known)

        def take(scores: Sequence[tuple[int, Score]]) -> None:
            done.update(index for index, _ in scores)
            on_scores(scores)

        for limits in (self.limits, self.limits.quarter()):
            try:
                found = self.units(requests, limits)
                if share is not None:
                    done.update(share(found, done))
                    share = None
                self._score_units(found, requests, done, take, limits)
                return
            except (MemoryError, RuntimeError) as error:
                if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error)):
                    raise
                if limits is not self.limits:
                    raise HfpatchError(
                        f"out of memory, even with {limits.tokens} tokens at once; reduce token_budget or max_length, "
                        "use a smaller dtype, or more memory (nothing scored so far is lost)"
                    ) from error
                logger.warning("out of memory with %s tokens at once; trying a quarter", limits.tokens)
            if input_device(self.model).type == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def _score_units(
        self,
        found: Sequence[Unit],
        requests: Sequence[TokenRequest],
        done: Collection[int],
        take: OnScores,
        limits: BatchLimits,
    ) -> None:
        modules = self.trimmable if self._takes_padding(requests) else ()
        for unit in found:
            pool = Pool(self.parts, limits)
            for batch in unit.missing(done):
                pool.add(*self._features(batch, requests, modules))
            if scores := pool.flush():
                take(scores)

    def _features(
        self, batch: Sequence[Tree], requests: Sequence[TokenRequest], modules: Modules
    ) -> tuple[torch.Tensor, Table]:
        """Return the features (n, width) of a batch's scored positions and the targets that they predict.

        A position that is alone comes twice: the rounding of MKL's product of one row depends on where in memory the
        weights begin, which differs between processes.
        """
        inputs = model_inputs(self.model, batch)
        positions, targets = scored_positions(batch, requests)
        if len(positions) == 1:
            positions = positions.repeat(2, axis=0)
        rows, nodes = torch.from_numpy(positions).to(inputs["tokens"].device).unbind(1)
        with only_at(modules, rows, nodes, inputs["tokens"]):
            features = self.parts.features(**inputs)
        return features[rows, nodes], targets

    def units(self, requests: Sequence[TokenRequest], limits: BatchLimits) -> list[Unit]:
        """Return the batches that score all requests, in units; they depend on the requests and the limits alone."""
        return units(self.batches(requests, limits), limits, together=not isinstance(self.parts, WholeModel))

    @torch.no_grad()
    def batches(self, requests: Sequence[TokenRequest], limits: BatchLimits) -> list[list[Tree]]:
        """Return the batches that score all requests."""
        tokens = limits.tokens
        if isinstance(self.parts, WholeModel):
            words = self.model.get_input_embeddings().weight.shape[0]
            tokens = min(tokens, max(_FEWEST_TOKENS, limits.logits // words))  # each position has a row of logits
        if not self._takes_padding(requests):
            return [[row] for row in sorted(plain_rows(requests), key=lambda row: (-len(row), row.tokens))]
        rows = self._rows(requests, tokens)
        return batches(rows, replace(limits, tokens=tokens).divided(sum(map(len, rows))))

    def _takes_padding(self, requests: Sequence[TokenRequest]) -> bool:
        """Return whether rows as long as the requests' may be padded, and share rows."""
        sizes = [len(request.tokens) for request in requests]
        longest = max(sizes, default=1)
        shortest = min([longest - 1, *sizes])
        lengths = (shortest, longest)
        if any(why is None and low <= shortest and longest <= high for (low, high), why in self._padded.items()):
            return True
        if lengths not in self._padded:
            why = self._padded[lengths] = padding_obstacle(self.model, self.parts, self.trimmable, *lengths)
            if why is not None:
                self._warn(f"rows of {shortest} to {longest} tokens are scored one by one ({why})")
        return self._padded[lengths] is None

    def _rows(self, requests: Sequence[TokenRequest], tokens: int) -> list[Tree]:
        """Return the rows that score all requests; a row with several endings is no longer than a probe finds exact."""
        while True:
            longest = self.sharing.longest
            rows = pack(group(requests, longest=longest, endings=tokens), min(longest, tokens))
            size = max((len(row) for row in rows if not row.is_chain), default=0)
            if size <= self._shared:
                return rows
            if trees_are_exact(self.model, self.parts, size):
                self._shared = size
            else:
                shorter = size // 2 if size // 2 >= SHORT else 0
                self.sharing = Sharing(shorter, f"a probe of {size} tokens gave different numbers")
                self._warn_of_sharing()

    def _warn_of_sharing(self) -> None:
        longest, reason = self.sharing.longest, self.sharing.reason
        if longest == 0:
            self._warn(f"endings do not share their context ({reason}); plain rows are scored")
        elif reason is not None:
            self._warn(f"endings share their context only in rows of up to {longest} tokens ({reason})")

    def _warn(self, limit: str) -> None:
        if self._finite:
            _warn_once(f"{type(self.model).__name__}: {limit}")


@lru_cache(maxsize=64)
def _warn_once(line: str) -> None:
    logger.warning("%s", line)
