"""The tasks that settings ask for: single ones, and those of lm-eval's groups and tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.clusters import cluster_columns
from hfpatch.evaluation.tasks import load_named
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.schema import GroupResult, TaskResult


@dataclass(frozen=True)
class Selection:
    """Tasks that are scored together.

    Attributes:
        tasks: lm-eval's task objects by name.
        groups: lm-eval's groups that were asked for, and those in them.
        limits: how many of the first documents of each task are scored; None is all.
        clusters: by task the column that says which documents belong together; others have none.
    """

    tasks: dict[str, Any]
    groups: dict[str, Any]
    limits: dict[str, int | None]
    clusters: dict[str, str]

    def only(self, name: str, limit: int) -> Selection:
        """Return one of the tasks, with another limit."""
        return replace(self, tasks={name: self.tasks[name]}, groups={}, limits={name: limit})

    def group_results(self, scores: Mapping[str, TaskResult]) -> dict[str, GroupResult]:
        """Return the score of each group that lm-eval gives one, as lm-eval aggregates those of its tasks."""
        known = {name: as_lm_eval(score) for name, score in scores.items()}
        found = {}
        for name, group in self.groups.items():
            if not group.has_aggregation:
                continue
            aggregated = group.aggregate(known)
            values = {key.removesuffix(",none"): value for key, value in aggregated.items() if "," in key}
            found[name] = GroupResult(
                group=group.name,
                tasks=group.child_names,
                n=aggregated["sample_len"],
                metrics={key: value for key, value in values.items() if "_stderr" not in key},
                stderr={key.replace("_stderr", "", 1): value for key, value in values.items() if "_stderr" in key},
                version=group.version,
            )
        return found


def select(settings: EvaluationSettings, data_dir: Path | None = None) -> Selection:
    """Load the tasks that settings name, each once.

    Raises:
        HfpatchError: as `load_tasks`; if two names have a task in common, a task cannot be run as the settings say, or
            its documents have no such column as ``cluster`` names.
    """
    given: dict[str, Any] = settings.task_options
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name in settings.tasks:
        named = load_named(name, data_dir=data_dir, **given)
        for task in named.tasks:
            if source.setdefault(task, name) != name:
                raise HfpatchError(f"task {task}: is asked for by {source[task]!r} and {name!r}; leave one out")
        tasks |= named.tasks
        groups |= named.groups

    # tasks that cannot be run as the settings say
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not settings.confirm_run_unsafe_code:
            raise HfpatchError(
                f"task {name}: executes the code that the model writes; --confirm-run-unsafe-code (in a recipe "
                "evaluation.confirm_run_unsafe_code) allows it"
            )
        if getattr(task, "MULTIMODAL", False):
            raise HfpatchError(f"task {name}: shows images or sounds to the model; hfpatch scores text only")
    if settings.gen_kwargs and not any(task.OUTPUT_TYPE == "generate_until" for task in tasks.values()):
        raise HfpatchError("gen_kwargs: none of the tasks generates text, so it would change nothing; leave it out")

    limits = {task: settings.limit_of(source[task], len(tasks[task].eval_docs)) for task in tasks}
    columns = {task: settings.cluster[source[task]] for task in tasks if source[task] in settings.cluster}
    return Selection(tasks, groups, limits, cluster_columns(tasks, columns))


def as_lm_eval(score: TaskResult | GroupResult) -> dict[str, Any]:
    """Return scores and standard errors by lm-eval's keys, ``metric,filter`` and ``metric_stderr,filter``."""
    found: dict[str, Any] = {"sample_len": score.n}
    for metric, value in score.metrics.items():
        name, _, answer_filter = metric.partition(",")
        suffix = answer_filter or "none"
        found |= {f"{name},{suffix}": value, f"{name}_stderr,{suffix}": score.stderr.get(metric, "N/A")}
    return found
