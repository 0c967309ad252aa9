"""The settings of an evaluation in lm-eval's terms: tasks, groups, limits and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpatch.errors import HfpatchError, nearest
from hfpatch.evaluation.clusters import cluster_columns
from hfpatch.evaluation.tasks import load_named
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.parts import GroupResult, TaskResult


@dataclass(frozen=True)
class Selection:
    """Tasks that are scored together.

    Attributes:
        settings: how they are run.
        tasks: lm-eval's task objects by name.
        groups: lm-eval's groups by name, nested ones included.
        limits: how many of the first documents of each task are scored; None is all.
        clusters: by task the column that groups its documents.
    """

    settings: EvaluationSettings
    tasks: dict[str, Any]
    groups: dict[str, Any]
    limits: dict[str, int | None]
    clusters: dict[str, str]

    def only(self, name: str, limit: int) -> Selection:
        """Return one of the tasks, with another limit."""
        return replace(self, tasks={name: self.tasks[name]}, groups={}, limits={name: limit})

    def group_results(self, scores: Mapping[str, TaskResult]) -> dict[str, GroupResult]:
        """Return the score of each group that lm-eval gives one, as lm-eval aggregates those of its tasks."""
        by_task = {name: as_lm_eval(score) for name, score in scores.items()}
        results = {}
        for name, group in self.groups.items():
            if not group.has_aggregation:
                continue
            aggregated = group.aggregate(by_task)
            values = {key.removesuffix(",none"): value for key, value in aggregated.items() if "," in key}
            results[name] = GroupResult(
                group=group.name,
                tasks=group.child_names,
                n=aggregated["sample_len"],
                metrics={key: value for key, value in values.items() if "_stderr" not in key},
                stderr={key.replace("_stderr", "", 1): value for key, value in values.items() if "_stderr" in key},
                version=group.version,
            )
        return results


def select(settings: EvaluationSettings, data_dir: Path | None = None) -> Selection:
    """Load the tasks that settings name, each once.

    Raises:
        HfpatchError: as `load_tasks`; if two names have a task in common, a task cannot be run with the settings, or
            its documents have no column of the name in ``cluster``.
    """
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name in settings.tasks:
        named = load_named(name, settings, data_dir)
        for task in named.tasks:
            if source.setdefault(task, name) != name:
                raise HfpatchError(f"task {task}: is part of both {source[task]!r} and {name!r}; leave one out")
        tasks |= named.tasks
        groups |= named.groups

    # tasks that cannot be run with the settings
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not settings.confirm_run_unsafe_code:
            raise HfpatchError(
                f"task {name}: executes code that the model writes; evaluation.confirm_run_unsafe_code=true allows it"
            )
        if getattr(task, "MULTIMODAL", False):
            raise HfpatchError(f"task {name}: shows images or sounds to the model; hfpatch scores text only")
    if settings.gen_kwargs and not any(task.OUTPUT_TYPE == "generate_until" for task in tasks.values()):
        raise HfpatchError("gen_kwargs: none of the tasks generates text, so it would change nothing; leave it out")

    limits = {task: settings.limit_of(source[task], len(tasks[task].eval_docs)) for task in tasks}
    columns = {task: settings.cluster[source[task]] for task in tasks if source[task] in settings.cluster}
    return Selection(settings, tasks, groups, limits, cluster_columns(tasks, columns))


def as_lm_eval(score: TaskResult | GroupResult) -> dict[str, Any]:
    """Return scores and standard errors by lm-eval's keys, ``metric,filter`` and ``metric_stderr,filter``."""
    values: dict[str, Any] = {"sample_len": score.n}
    for metric, value in score.metrics.items():
        name, _, answer_filter = metric.partition(",")
        suffix = answer_filter or "none"
        values |= {f"{name},{suffix}": value, f"{name}_stderr,{suffix}": score.stderr.get(metric, "N/A")}
    return values


def prompting(settings: EvaluationSettings) -> dict[str, Any]:
    """Return the arguments of lm-eval's ``evaluate`` that decide the prompts."""
    as_turns = settings.fewshot_as_multiturn
    return {
        "apply_chat_template": settings.apply_chat_template,
        "system_instruction": settings.system_instruction,
        "fewshot_as_multiturn": bool(settings.apply_chat_template) if as_turns is None else as_turns,
        "confirm_run_unsafe_code": settings.confirm_run_unsafe_code,
    }


def template_arguments(tokenizer: PreTrainedTokenizerBase, asked: bool | str) -> dict[str, Any] | None:
    """Return the arguments of the tokenizer's ``apply_chat_template`` that select a template.

    lm-eval 0.4.13 writes the name of a template in its results but applies the default one. A tokenizer has no
    template, one, or several by name; True asks for the only one or the one called ``default``.

    Raises:
        HfpatchError: if there is no such template.
    """
    templates: Any = tokenizer.chat_template
    if not asked:
        return None
    if not templates:
        raise HfpatchError("apply_chat_template: the tokenizer of this model has no chat template; leave it out")
    if isinstance(templates, str):
        if asked is not True:
            raise HfpatchError(f"apply_chat_template {asked}: the tokenizer has one template; give no name")
        return None
    name = "default" if asked is True else asked
    if name not in templates:
        raise HfpatchError(
            f"apply_chat_template: the tokenizer has no template {name!r}{nearest(name, templates)}; there are "
            f"{', '.join(sorted(templates))}"
        )
    return {"chat_template": templates[name]}
