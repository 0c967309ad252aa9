"""What a score is of, beside the model: what the model is sent, and what becomes of its answers.

The prompts are hashed as they are sent, so that no setting of a task, a tokenizer or a template has to be named here to
count. What they do not show (targets, metrics, filters) is the task's own: its configuration and its code.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from hfpatch.support.code import hash_code

_OF_DOCUMENTS = {
    *("task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset"),
    *("training_split", "validation_split", "test_split", "fewshot_split"),
}
"""Keys of a task that say where its documents are from; these have a hash of their own."""


class Prompts:
    """The hashes of what a model is sent for one task, in order, whatever the batches and the processes."""

    def __init__(self) -> None:
        self._texts, self._tokens = hashlib.sha256(), hashlib.sha256()

    def add_texts(self, requests: Iterable[Any]) -> None:
        """Add lm-eval's requests as they are asked: contexts, continuations and arguments of generation."""
        for request in requests:
            asked = [request.request_type, *request.args]
            self._texts.update(json.dumps(asked, sort_keys=True, default=str).encode() + b"\n")

    def add_tokens(self, rows: Iterable[Sequence[int]]) -> None:
        """Add the token ids of requests as they are computed, after truncation."""
        for row in rows:
            self._tokens.update(array("q", (len(row), *row)).tobytes())

    def to_json(self) -> dict[str, str]:
        """Return the two hashes as fields of a task's result."""
        return {"prompts_sha256": self._texts.hexdigest(), "tokens_sha256": self._tokens.hexdigest()}


def hash_task(task: Any, seed: Any = None) -> str:
    """Return the SHA-256 of what turns answers into scores: a task's configuration, its class, metrics and filters.

    Args:
        task: lm-eval's task.
        seed: the seeds of the evaluation, which decide text that is drawn.
    """
    config = [(key, value) for key, value in vars(task.config).items() if key not in _OF_DOCUMENTS]
    made = [(name, vars(task).get(name)) for name in ("_metric_fn_list", "_aggregation_list", "_metric_fn_kwargs")]
    used = [(name, *(found or {}).items()) for name, found in made]
    drawn = seed if task.OUTPUT_TYPE == "generate_until" else None
    return hash_code([("class", type(task)), *config, *used, ("filters", *vars(task).get("_filters", ())), (drawn,)])
