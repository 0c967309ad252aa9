"""Finding what is wrong with a task: its file, its metrics or one of its documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from lm_eval.api.registry import get_metric_aggregation

from hfpatch.errors import HfpatchError


def refuse_broken_file(name: str, files: Iterable[Path]) -> None:
    """Refuse a task whose file is no YAML; lm-eval passes over such files in silence.

    Raises:
        HfpatchError: naming the file, the line and what is wrong there.
    """
    bears_name = re.compile(rf"""^task:\s+["']?{re.escape(name)}["']?\s*$""", re.MULTILINE)
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.stem != name and not bears_name.search(text):
            continue
        try:
            yaml.compose(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 0
            raise HfpatchError(f"task {name}: {file}, line {line}: not YAML ({error.problem})") from error


def refuse_unknown_metrics(task: Any, where: str) -> None:
    """Refuse a task that names a metric which lm-eval does not find; it would leave that one out.

    Raises:
        HfpatchError: naming the metric.
    """
    if task.get_config("process_results") is not None:
        return
    for metric, function in getattr(task, "_metric_fn_list", {}).items():
        if function is None:
            raise HfpatchError(f"{where}: there is no metric {metric!r}; give one that lm-eval has, such as 'acc'")


def refuse_metrics_without_aggregation(config: Mapping[str, Any], where: str) -> None:
    """Refuse a task configuration with a metric that says nowhere how documents are taken together.

    Raises:
        HfpatchError: naming the metric.
    """
    for metric in config.get("metric_list") or ():
        name = metric.get("metric")
        if isinstance(name, str) and "aggregation" not in metric and get_metric_aggregation(name) is None:
            raise HfpatchError(
                f"{where}: there is no metric {name!r} with an aggregation of its own; give one that lm-eval has, such "
                "as 'acc', or an aggregation, such as 'mean'"
            )


def first_unfit_document(task: Any, limit: int | None) -> tuple[int, Exception] | None:
    """Return the index of the first document that a task's templates do not take, and what they say of it."""
    parts = [task.doc_to_text, task.doc_to_target]
    if task.get_config("doc_to_choice") is not None:
        parts.append(task.doc_to_choice)
    for index, document in enumerate(islice(task.eval_docs, limit)):
        try:
            for part in parts:
                part(document)
        except Exception as error:  # templates and functions of tasks raise whatever they like
            return index, error
    return None
