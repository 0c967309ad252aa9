"""The scoring of arXiv 2604.10791 as lm-eval tasks, for the files in ``eval/paper``.

It differs from lm-eval's own: 500 documents, raw contexts, choices by mean log-probability per token, and a perplexity
that weighs paragraphs, not words. Only the lm-eval model ``hfpatch`` answers its two kinds of request, which count
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lm_eval.api.task import ConfigurableTask

if TYPE_CHECKING:
    from datasets import Dataset

_DOCUMENTS = 500
_LINES = 300
_SHORTEST_CHARACTERS = 50
_LONGEST_TOKENS = 512


def first_documents(dataset: Dataset) -> Dataset:
    """Return the first 500 documents."""
    return dataset.select(range(min(_DOCUMENTS, len(dataset))))


def first_paragraphs(dataset: Dataset) -> Dataset:
    """Return the lines of 50 characters or more among the first 300."""
    lines = dataset[:_LINES]["text"]
    return dataset.select([index for index, line in enumerate(lines) if len(line) >= _SHORTEST_CHARACTERS])


def exponential_mean(losses: Sequence[float]) -> float:
    """Return exp of the mean of per-paragraph mean losses."""
    return math.exp(fmean(losses))


def paragraph_loss(doc: dict[str, Any], results: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """Return a paragraph's mean loss per predicted token, in nats, and its log-likelihood with the bytes predicted."""
    ((value, tokens, size),) = results
    return {"paragraph_perplexity": -value / tokens, "bits_per_byte": (value, size)}


class TokenTask(ConfigurableTask):
    """A task whose scores are per token, so that they depend on the tokenizer.

    Its requests go to a method of the model that also returns token counts.
    """

    REQUEST: str

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **options: Any) -> list[Any]:
        """Return the requests of one document, with the request type of this task."""
        made = super().construct_requests(doc, ctx, **options)
        requests = made if isinstance(made, list) else [made]
        for request in requests:
            request.request_type = self.REQUEST
        return requests


class PerTokenChoice(TokenTask):
    """A choice by the highest mean log-probability per token: ``argmaxⱼ log p(endingⱼ | context) / |endingⱼ|``."""

    REQUEST = "loglikelihood_per_token"

    def process_results(self, doc: dict[str, Any], results: Sequence[tuple[float, int]]) -> dict[str, float]:
        """Return whether the right choice has the highest mean log-probability; of equal ones the first counts."""
        means = [value / tokens for value, tokens in results]
        return {"acc": float(means.index(max(means)) == self.doc_to_target(doc))}


class ParagraphPerplexity(TokenTask):
    """``exp(mean over paragraphs of the mean loss)``; a paragraph is cut at 512 tokens, its first token is given."""

    REQUEST = "paragraph_loglikelihood"

    def construct_requests(self, doc: dict[str, Any], ctx: str, **options: Any) -> list[Any]:
        """Return the one request of a paragraph."""
        requests = super().construct_requests(doc, ctx, **options)
        for request in requests:
            request.arguments = (*request.arguments, _LONGEST_TOKENS)
        return requests
