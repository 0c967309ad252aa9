"""The texts of tasks: what must not be trained or tuned on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def task_texts(tasks: Mapping[str, Any]) -> Iterator[str]:
    """Yield every text of every document that tasks evaluate, whatever the field and however deep it is.

    Args:
        tasks: lm-eval's tasks, as `load_tasks` returns them.
    """
    for task in tasks.values():
        for document in task.eval_docs:
            yield from _texts(document)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
