"""What differs between the runs of one report, in sentences: how they were measured, and how they were trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hfpatch.reporting.facts import digest, settings_text
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.folder import Results
from hfpatch.results.identity import (
    FREE_SETTINGS,
    OF_BASE,
    OF_TASK,
    Respect,
    base_identity,
    computed_differently,
    differing,
)
from hfpatch.results.parts import Task


def measured_differently(runs: Mapping[str, Results]) -> Iterator[str]:
    """Yield what may keep scores of runs apart, by label: bases, tasks, settings, and what computed the scores."""
    values: dict[str, dict[Respect, str]] = {}
    for label, results in runs.items():
        if isinstance(results, ComparisonResults):
            values[label] = _of_base(results.model) | _of_tasks(results.tasks, results.model)
            continue
        for name, variant in results.variants.items():  # patches have the base of all, models are bases themselves
            model, unit = variant.model or results.model, label if variant.model is None else f"{label}: {name}"
            values.setdefault(unit, {}).update(_of_base(model) | _of_tasks(variant.scores, model))
    yield from differing(values)
    yield from evaluated_differently(runs)


def evaluated_differently(runs: Mapping[str, Results]) -> Iterator[str]:
    """Yield in which settings of their evaluations runs differ, and in what computed their scores, by label."""
    settings, computed = {}, {}
    for label, results in runs.items():
        if isinstance(results, ComparisonResults):
            given = results.evaluation
            made = [run.computed_with for method in results.methods.values() for run in method.runs.values()]
        else:
            given, made = results.settings, [results.provenance.get("computed_with")]
        settings[label] = _of_settings("Evaluation", given, FREE_SETTINGS)
        if isinstance(first := next(filter(None, made), None), Mapping):
            computed[label] = first
    yield from differing(settings)
    yield from computed_differently(computed)


def trained_differently(runs: Mapping[str, ComparisonResults]) -> Iterator[str]:
    """Yield what may explain differences between the methods of runs, by label: text, batches, settings and code."""
    values: dict[str, dict[Respect, str]] = {}
    for label, results in runs.items():
        tuning, seeds, made = results.tuning, results.training.get("seeds"), results.provenance
        rates = ", ".join(f"{rate:g}" for rate in tuning.learning_rates) if tuning else ""
        tuned = f"{tuning.steps} steps with seed {tuning.seed} at each of {rates}" if tuning else ""
        values[label] = {
            ("Training text",): digest(results.data.get("sha256")) or settings_text(results.data),
            **{(f"Batch plan of seed {seed}", seed): digest(plan.get("sha256")) for seed, plan in results.plan.items()},
            **_of_settings("Training", results.training, ["seeds"]),
            ("Tuning",): tuned,
            ("Seeds",): ", ".join(map(str, results.seeds)),
            ("Looks",): ", ".join(map(str, seeds["looks"])) if isinstance(seeds, dict) else "",
            ("Commit",): str(made.get("commit") or ""),
            ("Versions",): settings_text(made.get("versions") or {}),
            ("Device",): str(made.get("device") or ""),
        }
    yield from differing(values)


def _of_base(model: Mapping[str, Any]) -> dict[Respect, str]:
    """Return name, dtype and weights of a base, and the rest on the condition of the same weights."""
    base = base_identity(model)
    parts = str(model.get("name") or ""), str(base["dtype"] or ""), digest(base["base_weights"])
    rest = {what: digest(base[name]) for name, what in OF_BASE.items() if name != "base_weights"}
    rest["way of loading"] = settings_text(base["loading"])
    values: dict[Respect, str] = {("Frozen model",): ", ".join(filter(None, parts))}
    for what, value in rest.items():
        values[f"{what.capitalize()}, of the same weights", str(base["base_weights"])] = value
    return values


def _of_tasks(tasks: Mapping[str, Task], model: Mapping[str, Any]) -> dict[Respect, str]:
    """Return measure, documents, prompts and scoring of tasks; the tokens of the same prompts by the same tokenizer."""
    base = base_identity(model)
    values: dict[Respect, str] = {("Tasks",): ", ".join(tasks)}
    for name, task in tasks.items():
        groups = f" by {task.clusters.column}" if task.clusters else ""
        values[f"{name}, measure", name] = f"{task.primary} on {task.n} documents{groups}"
        for field, what in OF_TASK.items():
            same = (str(base["tokenizer"] or base["base_weights"]), task.prompts_sha256)
            respect = (f"{name}, {what}", name, *(same if field == "tokens_sha256" else ()))
            values[respect] = digest(getattr(task, field))
    return values


def _of_settings(section: str, settings: Mapping[str, Any], free: Collection[str]) -> dict[Respect, str]:
    """Return the settings that are set, without free ones."""
    kept = {key: value for key, value in settings.items() if key not in free and value not in (None, [], {})}
    return {(f"{section}, {key}",): settings_text(value) for key, value in kept.items()}
