"""The tiny world's items as lm-eval data sets: ``test`` is scored, ``examples`` are there for few-shot prompts."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from hfpatch.tinyworld.tasks import examples, items


def cloze(**_: Any) -> dict[str, Dataset]:
    """Return the passages whose last word is to be found."""
    return _dataset("cloze")


def endings(**_: Any) -> dict[str, Dataset]:
    """Return the passages with four endings."""
    return _dataset("endings")


def questions(**_: Any) -> dict[str, Dataset]:
    """Return the passages with a question and four answers."""
    return _dataset("questions")


def text(**_: Any) -> dict[str, Dataset]:
    """Return the documents for the rolling perplexity."""
    return _dataset("text")


def _dataset(task: str) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(items(task)), "examples": Dataset.from_list(examples(task))}
