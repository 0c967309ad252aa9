"""Scoring many requests: grouped, batched, in whatever memory there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer.budget import Budget, batches
from hfpatch.evaluation.scorer.exactness import (
    SHORT,
    Sharing,
    find_sharing,
    padding_obstacle,
    random_tokens,
    trees_are_exact,
)
from hfpatch.evaluation.scorer.grouping import TokenRequest, Tree, group, plain_rows
from hfpatch.evaluation.scorer.head import Parts, WholeModel, split_model
from hfpatch.evaluation.scorer.inputs import model_inputs
from hfpatch.evaluation.scorer.packing import packed
from hfpatch.evaluation.scorer.rows import Answer, Pool, Table, scored_places
from hfpatch.evaluation.scorer.trimming import Modules, find_trimmable, only_at

logger = logging.getLogger(__name__)

OnAnswers = Callable[[Sequence[tuple[int, Answer]]], None]

_PROBE_TOKENS = 16
_FEWEST_TOKENS = 256


class Scorer:
    """Scores token requests on one model, as it stands when the scorer is made.

    Args:
        model: a causal language model in evaluation mode, with adapters or without.
        max_length: the longest row that the model takes.
        budget: how much goes through the model at once; None takes what suits the device.
    """

    def __init__(self, model: Any, max_length: int, budget: Budget | None = None) -> None:
        self.model = model
        self.budget = budget or Budget.usual(model.device)
        with torch.no_grad():
            probe = random_tokens(model, 1, min(_PROBE_TOKENS, max_length))
            self.parts: Parts = split_model(model)
            sound = not self.parts.features(probe).isnan().any()
            self.trimmable: Modules = find_trimmable(model, self.parts, probe)
            self.sharing: Sharing = (
                find_sharing(model, self.parts, max_length)
                if max_length >= _PROBE_TOKENS
                else Sharing(0, "its rows are too short to try")
            )
        self._sound = sound  # of a broken model a probe tells nothing
        self._padded: dict[tuple[int, int], str | None] = {}
        self._shared = SHORT
        self._say_limits()

    def score(self, requests: Sequence[TokenRequest], on_answers: OnAnswers, *, known: Collection[int] = ()) -> None:
        """Score requests, and hand over the answers of each batch as soon as they are there.

        Args:
            requests: what to score; all of them decide how batches are made up, whatever is known of them.
            on_answers: called with the index and the answer of each request in a batch.
            known: indices of requests that need no answer; a batch of such alone is left out.

        Raises:
            HfpatchError: if memory is too small for a quarter of the budget, too.
        """
        answered = set(known)

        def take(answers: Sequence[tuple[int, Answer]]) -> None:
            answered.update(index for index, _ in answers)
            on_answers(answers)

        try:
            self._pass(requests, answered, take, self.budget)
        except (MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            logger.warning("out of memory with %s tokens at once; trying a quarter", self.budget.tokens)
        else:
            return
        self._with_less(requests, answered, take)

    def _with_less(self, requests: Sequence[TokenRequest], answered: set[int], take: OnAnswers) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        less = self.budget.smaller()
        try:
            self._pass(requests, answered, take, less)
        except (MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            raise HfpatchError(
                f"out of memory, even with {less.tokens} tokens at once; give a smaller token_budget, max_length or "
                "dtype, or more memory (nothing scored before is lost)"
            ) from error

    @torch.no_grad()
    def _pass(self, requests: Sequence[TokenRequest], answered: set[int], take: OnAnswers, budget: Budget) -> None:
        pool = Pool(self.parts, budget)
        modules = self.trimmable if self._takes_padding(requests) else ()
        for batch in self.batches(requests, budget):
            if all(index in answered for tree in batch for index, _ in tree.scored):
                continue
            pool.add(*self._features(batch, requests, modules))
            if pool.full:
                take(pool.empty())
        take(pool.empty())

    def _features(
        self, batch: Sequence[Tree], requests: Sequence[TokenRequest], modules: Modules
    ) -> tuple[torch.Tensor, Table]:
        """Return the features (n, width) of a batch's scored positions and what is asked of them."""
        inputs = model_inputs(self.model, batch)
        places, targets = scored_places(batch, requests)
        rows, nodes = torch.from_numpy(places).to(self.model.device).unbind(1)
        with only_at(modules, rows, nodes, inputs["tokens"]):
            features = self.parts.features(**inputs)
        return features[rows, nodes], targets

    @torch.no_grad()
    def batches(self, requests: Sequence[TokenRequest], budget: Budget) -> list[list[Tree]]:
        """Return the batches that score all requests."""
        tokens = budget.tokens
        if isinstance(self.parts, WholeModel):
            words = self.model.get_input_embeddings().weight.shape[0]
            tokens = min(tokens, max(_FEWEST_TOKENS, budget.logits // words))  # each position has a row of logits
        if not self._takes_padding(requests):
            return [[row] for row in sorted(plain_rows(requests), key=lambda row: (-len(row), row.tokens))]
        return batches(self._rows(requests, tokens), replace(budget, tokens=tokens))

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
                self._say(f"rows of {shortest} to {longest} tokens are scored one by one ({why})")
        return self._padded[lengths] is None

    def _rows(self, requests: Sequence[TokenRequest], tokens: int) -> list[Tree]:
        """Return the rows that score all requests, no longer with several endings than a probe finds exact."""
        while True:
            longest = self.sharing.longest
            rows = packed(group(requests, longest=longest, endings=tokens), min(longest, tokens))
            size = max((len(row) for row in rows if not row.is_chain), default=0)
            if size <= self._shared:
                return rows
            if trees_are_exact(self.model, self.parts, size):
                self._shared = size
            else:
                shorter = size // 2 if size // 2 >= SHORT else 0
                self.sharing = Sharing(shorter, f"a probe of {size} tokens gave other numbers")
                self._say_limits()

    def _say_limits(self) -> None:
        if isinstance(self.parts, WholeModel):
            self._say("body and head cannot be told apart; every position's logits are computed")
        longest, reason = self.sharing.longest, self.sharing.reason
        if longest == 0:
            self._say(f"endings do not share their context ({reason}); plain rows are scored")
        elif reason is not None:
            self._say(f"endings share their context in rows up to {longest} tokens only ({reason})")

    def _say(self, limit: str) -> None:
        if self._sound:
            _say_once(f"{type(self.model).__name__}: {limit}")


def _is_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error)


@lru_cache(maxsize=64)
def _say_once(line: str) -> None:
    logger.warning("%s", line)
