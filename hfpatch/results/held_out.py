"""The names under which results have the loss on the held-out documents, which is compared like a task's score."""

HELD_OUT = "held_out_text"
"""The task: the documents that ``data.held_out`` keeps out of training."""
NATS_PER_TOKEN = "nats_per_token"
"""Its metric: of a document the pair (log-likelihood, tokens); the score is ``-Σ log-likelihood / Σ tokens``."""
