"""The fast exact scorer: log-likelihoods as lm-eval's Hugging Face model gives them, at the cost of what was asked.

grouping   requests with one context become one row, a tree of endings
exactness  whether this model computes a tree as it computes plain rows, found out on the model itself
packing    short trees share a row
budget     rows of similar length become batches under a budget of tokens
head       the model as body and head, so that logits are computed at scored positions alone
trimming   the last block at scored positions alone
rows       one batch through the model: log-likelihoods and greedy decisions
scorer     all of it together
"""

from __future__ import annotations

from hfpatch.evaluation.scorer.grouping import TokenRequest
from hfpatch.evaluation.scorer.rows import Answer
from hfpatch.evaluation.scorer.scorer import Scorer

__all__ = ["Answer", "Scorer", "TokenRequest"]
