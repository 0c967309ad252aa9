"""The fast exact scorer: log-likelihoods as lm-eval's Hugging Face model gives them, computed only where needed.

trees      requests with one context become one row, a tree of endings; short trees share a row
batching   rows of similar length become batches of limited size, and a model's arguments
exactness  whether this model computes trees and padded rows as it computes plain rows, tried on the model itself
           where that costs less than it saves
head       the model as body and head, so that logits are computed at scored positions alone
trimming   the last block at scored positions alone
log_probs  log-likelihoods and greedy decisions from the features of scored positions
scorer     all of it together
"""

from __future__ import annotations

from hfpatch.evaluation.scorer.log_probs import Score
from hfpatch.evaluation.scorer.scorer import Scorer
from hfpatch.evaluation.scorer.trees import TokenRequest

__all__ = ["Score", "Scorer", "TokenRequest"]
