"""The tiny world's items as lm-eval data sets, and the parts of a request that are more than a field of an item.

``test`` is scored, ``examples`` are there for few-shot prompts. Functions stand here where a template would do, since
lm-eval compiles a template again for every document.
"""

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


def passage(doc: dict[str, Any]) -> str:
    """Return a cloze passage without its last word."""
    return str(doc["text"]).rpartition(" ")[0]


def last_word(doc: dict[str, Any]) -> str:
    """Return the last word of a cloze passage, with the space before it."""
    return " " + str(doc["text"]).rpartition(" ")[2]


def right_ending(doc: dict[str, Any]) -> int:
    """Return the index of the ending that fits."""
    return int(doc["label"])


def prompt(doc: dict[str, Any]) -> str:
    """Return a passage and the question about it."""
    return f"{doc['passage']}\nQuestion: {doc['question']}\nAnswer:"


def choices(doc: dict[str, Any]) -> list[str]:
    """Return the answers to choose from."""
    return list(doc["choices"]["text"])


def right_choice(doc: dict[str, Any]) -> int:
    """Return the index of the right answer."""
    return int(doc["choices"]["label"].index(doc["answerKey"]))


def _dataset(task: str) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(items(task)), "examples": Dataset.from_list(examples(task))}
