"""What a reader must know before believing a result: one sentence each, for the report and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hfpatch.evaluation import TaskResult, check_known_scores, unknown_base
from hfpatch.recipes.comparison import Recipe

UNMATCHED = 0.01
"""Share by which two trainable parameter counts may differ and still count as matched."""
SURVIVAL = 0.9
"""Share of trained weights that an update must really change."""
FEW_DOCUMENTS = 1000
"""Below this, a task tells only large differences from noise."""


def cautions(recipe: Recipe, results: Mapping[str, Any], references: Mapping[str, list[str]]) -> list[str]:
    """Return every caution that applies to ``results``, a results.json without its warnings."""
    return [
        *_base(recipe, results["methods"][recipe.baseline]),
        *_sizes(recipe, results["methods"], references),
        *_survival(results["methods"]),
        *_cut_short(results["methods"]),
        *_seeds(recipe),
        *_documents(results),
        *_forms(results["methods"]),
        *_dtypes(recipe),
        *_commits(results["methods"]),
    ]


def form_of(parts: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the form of a method's nonlinear query with a weight anchor, or None where it has none."""
    for part in parts:
        if part["type"] == "nonlinear_query" and part.get("anchor", "weight") == "weight":
            return str(part.get("form", "preserving"))
    return None


def known_score_surprises(recipe: Recipe, result: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each score of the base, a run's result.json, that lies outside what is published."""
    model = recipe.model
    return check_known_scores(model.name, model.revision, model.dtype, scores_of(result))


def scores_of(result: Mapping[str, Any]) -> dict[str, TaskResult]:
    """Return the scores in a run's result.json, by task."""
    return {task: TaskResult.model_validate(score) for task, score in result["evaluation"].items()}


def _base(recipe: Recipe, baseline: Mapping[str, Any]) -> Iterable[str]:
    for result in baseline["runs"].values():
        yield from known_score_surprises(recipe, result)
        if unknown := unknown_base(recipe.model.name, recipe.model.revision, recipe.model.dtype, scores_of(result)):
            yield unknown


def _sizes(recipe: Recipe, methods: Mapping[str, Any], references: Mapping[str, list[str]]) -> Iterable[str]:
    sizes = {name: method["parameters"]["trainable"] for name, method in methods.items()}
    unmatched: dict[str, list[str]] = {}
    for name, held_against in references.items():
        for control in held_against:
            if control != recipe.baseline and abs(sizes[control] - sizes[name]) > UNMATCHED * sizes[name]:
                told = f"{name} ({sizes[name]:,}, a ratio of {sizes[control] / sizes[name]:.2f})"
                unmatched.setdefault(control, []).append(told)
    for control, others in unmatched.items():
        yield (
            f"{control} has {sizes[control]:,} trainable parameters, which does not match {', '.join(others)}: "
            "a difference between them may be one of size."
        )


def _survival(methods: Mapping[str, Any]) -> Iterable[str]:
    for name, method in methods.items():
        shares = [
            share
            for run in method["runs"].values()
            if run["train"]
            for share in run["train"]["update_survival"].values()
        ]
        if shares and min(shares) < SURVIVAL:
            yield (
                f"{name}: as little as {min(shares):.0%} of a tensor's weights really changed in an optimiser step; "
                "the other updates were too small for the weights' dtype."
            )


def _cut_short(methods: Mapping[str, Any]) -> Iterable[str]:
    for name, method in methods.items():
        for seed, run in method["runs"].items():
            train = run["train"] or {}
            if (step := train.get("diverged_step")) is not None:
                yield f"{name}, seed {seed}: diverged at step {step}; it has no scores, and no comparison counts it."
            if skipped := train.get("skipped_steps"):
                yield f"{name}, seed {seed}: {skipped} updates were left out, their loss or gradient not being finite."
            if train.get("stopped_early"):
                yield f"{name}, seed {seed}: stopped early after {train['steps']} steps, so it saw less text."


def _seeds(recipe: Recipe) -> Iterable[str]:
    if len(recipe.training.seeds) == 1:
        yield "One seed only: how much the results vary from seed to seed is not known."


def _documents(results: Mapping[str, Any]) -> Iterable[str]:
    untested = [each["task"] for each in results["comparisons"] if each["verdict"] == "too few documents"]
    if untested:
        yield f"Too few documents to test any difference: {', '.join(dict.fromkeys(untested))}."
    limits = []
    for task, facts in results["tasks"].items():
        visible = [each["smallest_visible"] for each in results["comparisons"] if each["task"] == task]
        seen = [value for value in visible if value is not None]
        if facts["n"] < FEW_DOCUMENTS and seen:
            limits.append(f"{_short(max(seen))} ({task}, {facts['primary']}, {facts['n']} documents)")
    if limits:
        yield f"Few documents: differences below about {', '.join(limits)} cannot be told from noise."


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _forms(methods: Mapping[str, Any]) -> Iterable[str]:
    for name, method in methods.items():
        if method["form"] == "literal":
            yield (
                f"{name} is the literal form Q = (xW_Q + f(x))/2, which halves the pretrained attention logits at "
                "step 0; it does not start from the base model."
            )


def _dtypes(recipe: Recipe) -> Iterable[str]:
    training = recipe.training
    if training.trainable_dtype != "float32":
        others = ", ".join(f"{group} in {dtype}" for group, dtype in training.trainable_dtypes.items())
        kept = f"{training.trainable_dtype} ({others})" if others else training.trainable_dtype
        yield f"What is trained is kept in {kept}, which loses small updates."


def _commits(methods: Mapping[str, Any]) -> Iterable[str]:
    commits = {run["commit"] or "unknown" for method in methods.values() for run in method["runs"].values()}
    if len(commits) > 1:
        yield f"The runs were made with several commits of hfpatch: {', '.join(sorted(commits))}."
