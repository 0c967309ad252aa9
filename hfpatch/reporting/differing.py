"""What differs between the runs of one report, in sentences: how they were measured, and how they were trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from hashlib import sha256
from typing import Any

from hfpatch.errors import listed
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

_LONGEST = 100  # characters of a value


def measured_differently(runs: Mapping[str, Results]) -> Iterator[str]:
    """Yield what may keep scores of runs apart, by label: bases, tasks, settings, and what computed the scores."""
    values: dict[str, dict[Respect, str]] = {}
    for label, results in runs.items():
        if isinstance(results, ComparisonResults):
            values[label] = _of_base(results.model) | _of_tasks(results.tasks, results.model) | _of_decisions(results)
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
            made = [run.computed_with for run in results.runs.values()]
        else:
            given, made = results.settings, [results.provenance.get("computed_with")]
        settings[label] = _of_settings("Evaluation", given, FREE_SETTINGS)
        if kept := [values for values in made if isinstance(values, Mapping)]:
            computed[label] = kept
    yield from differing(settings)
    yield from computed_differently(computed)


def trained_differently(runs: Mapping[str, ComparisonResults]) -> Iterator[str]:
    """Yield what may explain differences between the methods of runs, by label: what was trained on what, and how."""
    values: dict[str, dict[Respect, str]] = {}
    for label, results in runs.items():
        tuning, study, seeds = results.tuning, results.study, results.training.get("seeds")
        values[label] = {
            **_of_settings("Architecture common to all", study.architecture if study else {}),
            **_of_settings("Tokenizer", study.tokenizer if study else {}),
            ("Training text",): _of_text(results.data),
            **{(f"Batch plan of seed {seed}", seed): digest(plan.get("sha256")) for seed, plan in results.plan.items()},
            **_of_settings("Training", results.training, ["seeds"]),
            ("Tuning text",): _of_text(tuning.text) if tuning else "",
            **_of_settings("Tuning", tuning.model_dump(exclude={"text", "trials", "chosen"}) if tuning else {}),
            ("Seeds",): ", ".join(map(str, results.seeds)),
            ("Looks",): ", ".join(map(str, seeds["looks"])) if isinstance(seeds, dict) else "",
            **_of_settings("Environment", results.provenance, ["command", "started", "wall_s"]),
            ("Commit of the runs",): ", ".join(sorted(results.commits)),
        }
    yield from differing(values)
    for name in dict.fromkeys(name for results in runs.values() for name in results.methods):
        having = {label: results for label, results in runs.items() if name in results.methods}
        yield from differing({label: _of_method(name, results, runs.values()) for label, results in having.items()})


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


def _of_decisions(results: ComparisonResults) -> dict[Respect, str]:
    """Return the text that is scored beside the tasks, and what is asked of the scores."""
    texts = results.retention.texts if results.retention is not None else {}
    asked = {f"Question {one.question} on {listed(one.on)}": one.pairs for one in results.questions}
    return {
        ("Held-out text",): _of_text(results.data.get("held_out")),
        **{(f"Text to keep, {name}",): _of_text(text) for name, text in texts.items()},
        **{(what,): _shortened(settings_text(pairs)) for what, pairs in asked.items()},
        **_of_settings("Margin", results.margin),
    }


def _of_method(name: str, results: ComparisonResults, runs: Collection[ComparisonResults]) -> dict[Respect, str]:
    """Return what a method is and how it was tuned, but for the architecture that is common to all of every run."""
    method, tuning = results.methods[name], results.tuning
    recorded: dict[str, Any] = {"parts": method.parts, "form": method.form}
    recorded["size"] = method.match.words if method.match is not None else None
    if method.variant is not None:
        common = set.intersection(*(set(run.study.architecture) if run.study else set() for run in runs))
        shared = {key: value for key, value in method.variant.architecture.items() if key not in common}
        recorded |= {"query": method.variant.query, "architecture": shared, "training": method.variant.training}
    if tuning is not None:
        recorded["values tried"] = [trial.values for trial in tuning.of(name)]
        recorded["values chosen"] = tuning.chosen[name].values if name in tuning.chosen else None
    return _of_settings(name, recorded)


def _of_text(text: Any) -> str:
    """Return the hash of a text, which covers all of it; what is known of it without one."""
    known = text if isinstance(text, Mapping) else {}
    return digest(known.get("sha256")) or settings_text(known)


def _of_settings(section: str, settings: Mapping[str, Any], free: Collection[str] = ()) -> dict[Respect, str]:
    """Return the settings that are set, those in mappings one by one, without free ones."""
    values: dict[Respect, str] = {}
    for key, value in settings.items():
        name = f"{section}, {key}"
        if key in free or value in (None, [], {}):
            continue
        if isinstance(value, Mapping):
            values |= _of_settings(name, value)
        else:
            values[name,] = digest(value) if key.endswith("sha256") else _shortened(settings_text(value))
    return values


def _shortened(text: str) -> str:
    """Return a text, or of a long one its hash."""
    return text if len(text) <= _LONGEST else f"SHA-256 {digest(sha256(text.encode()).hexdigest())}"
