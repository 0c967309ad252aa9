"""The texts of tasks: what must not be trained or tuned on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hfpatch.data.deciding import TaskDocument
from hfpatch.evaluation.harness import quiet, templates_compiled_once


def task_documents(tasks: Mapping[str, Any]) -> dict[str, list[TaskDocument]]:
    """Return every document that tasks evaluate, whatever the limit, by task.

    Args:
        tasks: lm-eval's tasks, as `load_tasks` returns them.
    """
    with quiet(), templates_compiled_once():
        return {
            name: [TaskDocument(_read(task, each), list(_texts(each))) for each in task.eval_docs]
            for name, task in tasks.items()
        }


def _read(task: Any, document: Mapping[str, Any]) -> list[str]:
    """Return what a model reads of a document, no examples before it: the prompt with each answer."""
    try:
        prompt = task.doc_to_text(document)
        if task.OUTPUT_TYPE == "generate_until":
            answers = task.doc_to_target(document)
            between = task.config.target_delimiter
            return [f"{prompt}{between}{each}" for each in (answers if isinstance(answers, list) else [answers])]
        if getattr(task, "multiple_input", False):
            prompt = task.doc_to_choice(document)
        made = task.construct_requests(document, prompt)
    except Exception:  # templates can raise anything; the evaluation names a document that it cannot score
        return []
    requests = made if isinstance(made, list) else [made]
    given = [[each for each in request.arguments if isinstance(each, str)] for request in requests]
    return ["".join(each) for each in given if each[0]]  # no answer without its prompt, as acc_mutual_info asks for


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
