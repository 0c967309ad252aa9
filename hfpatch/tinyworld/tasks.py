"""The pretrained checkpoints and the items of tasks, which ``tests/tinyworld/build.py`` made once.

The items are of the shifted split. Their forms are those of known tasks: ``cloze`` of LAMBADA (the last word follows
from the whole passage), ``endings`` of HellaSwag (four endings, one of them consistent), ``questions`` of ARC (four
choices) and ``text`` of WikiText (documents for a rolling perplexity).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, nearest

Item = dict[str, Any]

CHECKPOINTS = ("gpt-neox", "gpt2")
TASKS = ("cloze", "endings", "questions", "text")
DESCRIPTIONS = {
    "cloze": "the last word of a story, which follows from the whole of it",
    "endings": "which of four endings is consistent with the story",
    "questions": "a question on the story, with four answers",
    "text": "the likelihood of whole stories in the shifted way of speaking",
}
ITEMS = 400
_FOLDER = Path(__file__).parent / "items"


def checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint, in Hugging Face format: weights, config and tokenizer.

    Raises:
        HfpatchError: if there is no such checkpoint.
    """
    if name not in CHECKPOINTS:
        names = ", ".join(CHECKPOINTS)
        raise HfpatchError(f"tinyworld has no checkpoint {name!r}{nearest(name, CHECKPOINTS)}; it has {names}")
    return Path(__file__).parent / "checkpoints" / name


def items(task: str) -> list[Item]:
    """Read the items of a task that are to be scored.

    Raises:
        HfpatchError: if there is no such task.
    """
    return _read(task)[:ITEMS]


def examples(task: str) -> list[Item]:
    """Read a task's solved examples for few-shot prompts; none of them is among ``items``."""
    return _read(task)[ITEMS:]


def _read(task: str) -> list[Item]:
    if task not in TASKS:
        raise HfpatchError(f"tinyworld has no task {task!r}{nearest(task, TASKS)}; it has {', '.join(TASKS)}")
    return [json.loads(line) for line in (_FOLDER / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]
