"""What decides a score: the one list by which scores that are not of the same thing are told apart.

A resumed or grown run, the cache of answers, reports of several runs and the explorer all take it from here.
What a run is *of* is compared before anything is kept: the base, its tokenizer, its task, the method. What it was
computed *with* changes scores by rounding as a rule: it is part of the cache's key, and reports show where it differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hfpatch.recipes.comparison import PLACES

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
"""A task, by the fields of its result: what it is made of, what the model is sent, and what becomes of its answers."""
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


def facts_of_base(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``results.json`` says of a base's identity beside the hash of its weights."""
    return {name: shared[name] for name in OF_BASE if name != "base_weights"}


def task_identity(score: Any) -> dict[str, str | None]:
    """Return what a result of a task, or the task of a comparison, is of; None where an older file does not say."""
    return {name: getattr(score, name) for name in OF_TASK}


def base_identity(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the facts about a model in ``results.json`` say of its identity; None where an older file does not.

    A quantised or otherwise loaded base is another one: ``loading`` is what was not at its default. By which file its
    weights were named is not part of it: they have a hash.
    """
    known = model.get("identity")
    identity = known if isinstance(known, Mapping) else {}
    loading = model.get("loading")
    given = loading if isinstance(loading, Mapping) else {}
    return {
        **{name: identity.get(name) for name in OF_BASE},
        "base_weights": model.get("sha256"),
        "dtype": model.get("dtype"),
        "loading": {key: value for key, value in given.items() if key not in (*PLACES, "gguf_file")},
    }


def computed_differently(computed: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield in what runs, by their names, were not computed alike: a sentence for each.

    Args:
        computed: by run the values of :data:`COMPUTED_WITH`, of those that have them.
    """
    for key, what in COMPUTED_WITH.items():
        known: dict[str, list[str]] = {}
        differing = _differing([values.get(key) for values in computed.values()])
        for name, values in computed.items():
            known.setdefault(_text(values.get(key), differing), []).append(name)
        if len(known) > 1:
            each = "; ".join(f"{text}: {', '.join(names)}" for text, names in known.items())
            yield f"Scores were computed with another {what}: {each}."


def _differing(values: Sequence[Any]) -> list[str]:
    """Return the keys that are not the same in all values, where these are mappings."""
    given = [value for value in values if isinstance(value, Mapping)]
    return [
        key
        for key in dict.fromkeys(key for each in given for key in each)
        if len({repr(each.get(key)) for each in given}) > 1
    ]


def _text(value: Any, keys: Sequence[str] = ()) -> str:
    """Return a value in a few words, of a mapping these keys; a long one is recognised by its first characters."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value.get(key)}" for key in keys) or "the same"
    return "unknown" if value is None else str(value)[:12]
