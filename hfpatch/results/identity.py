"""The identity of a score: the one list of everything that decides it.

A resumed or grown run, the cache of answers, reports of several runs and the explorer all take it from here.
The base, its tokenizer, its task and the method are compared before anything is kept. Hardware and libraries
(:data:`COMPUTED_WITH`) as a rule change scores by rounding: they are part of the cache's key, and reports show
differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hfpatch.errors import listed
from hfpatch.recipes.base import NOT_IDENTITY
from hfpatch.results.parts import Task

OF_BASE = {
    "base_weights": "base weights",
    "base_buffers": "base buffers",
    "base_config": "base configuration",
    "base_code": "code of the base's modules",
    "tokenizer": "tokenizer or its chat template",
}
"""The base, by the hash of each; the ways of loading it are settings and stand beside these."""
OF_TASK = {
    "data_sha256": "documents",
    "prompts_sha256": "prompts",
    "tokens_sha256": "tokens of the prompts",
    "task_sha256": "metrics, filters or code of the task",
}
"""A task, by the fields of its result: its documents, its prompts, and the scoring of its answers."""
COMPUTED_WITH = {
    "class": "class of the model",
    "dtype": "dtype",
    "attention": "implementation of attention",
    "device": "kind of device",
    "tensor_parallel": "tensor parallelism",
    "cpu": "instructions of the processor",
    "matmul": "library of matrix products",
    "precision": "precision of matrix products",
    "versions": "versions of libraries",
    "code_sha256": "code of hfpatch that computes",
}
"""What computed the scores, and in which numbers."""
FREE_SETTINGS = {"tasks", "include_path", "batch_size", "token_budget", "allow_unknown_base", "confirm_run_unsafe_code"}
"""Settings of an evaluation in which runs may differ without any effect on a score of the same task."""


Respect = tuple[str, ...]
"""In what runs may differ, in words, and the conditions on which they are asked about it."""


def task_identity(score: Task) -> dict[str, str]:
    """Return the identity of the scores on a task."""
    return {name: getattr(score, name) for name in OF_TASK}


def base_identity(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity in the facts about a model in ``results.json``.

    A quantised base is another one: ``loading`` has the options that are not at their defaults. The name of the file of
    its weights is not part of it, as they have a hash.
    """
    stored = model.get("identity")
    identity = stored if isinstance(stored, Mapping) else {}
    loading = model.get("loading")
    given = loading if isinstance(loading, Mapping) else {}
    return {
        **{name: identity.get(name) for name in OF_BASE},
        "base_weights": model.get("sha256"),
        "dtype": model.get("dtype"),
        "loading": {key: value for key, value in given.items() if key not in (*NOT_IDENTITY, "gguf_file")},
    }


def differing(runs: Mapping[str, Mapping[Respect, str]]) -> Iterator[str]:
    """Yield a sentence for each respect in which runs are not the same, with the labels of the runs behind each value.

    A run without a value, or with an empty one, has none. Of a respect with conditions, only runs with these are asked.

    Args:
        runs: label -> respect -> value in words.
    """
    for respect in dict.fromkeys(respect for run in runs.values() for respect in run):
        labels: dict[str, list[str]] = {}
        for label, run in runs.items():
            if respect in run or len(respect) == 1:
                labels.setdefault(run.get(respect) or "none", []).append(label)
        if len(labels) > 1:
            yield f"{respect[0]}: {'; '.join(f'{value} ({listed(names)})' for value, names in labels.items())}."


def computed_differently(computed: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield a sentence for each way in which runs were computed differently.

    Args:
        computed: the values of :data:`COMPUTED_WITH` of all scores of a run, by run, where a run has them.
    """
    runs: dict[str, dict[Respect, str]] = {}
    for label, of_scores in computed.items():
        made = [_computed_in_words(values) for values in of_scores]
        respects = dict.fromkeys(words for one in made for words in one)
        runs[label] = {
            (f"Scores were computed with another {words}",): listed(sorted({one.get(words, "none") for one in made}))
            for words in respects
        }
    yield from differing(runs)


def _computed_in_words(values: Mapping[str, Any]) -> dict[str, str]:
    shown = {}
    for key, what in COMPUTED_WITH.items():
        value = values.get(key)
        for entry, one in (value if isinstance(value, Mapping) else {"": value}).items():
            text = "none" if one is None else str(one)[: 12 if key.endswith("sha256") else None]
            shown[f"{what}{f', {entry}' if entry else ''}"] = text
    return shown
