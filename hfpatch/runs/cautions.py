"""What a reader must know before believing a result: one sentence each, for the report and the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hfpatch.evaluation import TaskResult, check_known_scores, unknown_base
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pairs import controls_of
from hfpatch.results.cautions import PRODUCTS, floor_cautions, rates_sentence
from hfpatch.results.comparison import MATCHED
from hfpatch.results.identity import computed_differently
from hfpatch.results.schema import ComparisonResults, Method

SURVIVAL = 0.9
"""Share of trained weights that an update must really change."""


def cautions(recipe: Recipe, results: ComparisonResults, references: Mapping[str, list[str]]) -> list[str]:
    """Return every caution that applies to a complete comparison."""
    found: list[str] = []
    model, plain = recipe.model, recipe.evaluation.plain
    for run in results.methods[recipe.baseline].runs.values():
        unknown = unknown_base(model.full_name, model.revision, model.dtype, run.evaluation, plain=plain)
        found += known_score_surprises(recipe, run.evaluation)
        found += [unknown] if unknown else []
        found += floor_cautions(run.evaluation)
    found += [*_tuning(results), *_sizes(recipe, results, references), *_trainings(results.methods)]
    untested = [
        each.task if each.clusters is None else f"{each.task} ({each.clusters.groups} groups of {each.clusters.column})"
        for each in results.verdicts
        if each.why.startswith("too few")
    ]
    if untested:
        found.append(f"Too few documents to test any difference: {', '.join(dict.fromkeys(untested))}.")
    return [*found, *_settings(recipe, results)]


def form_of(parts: list[dict[str, Any]]) -> str | None:
    """Return the form of a method's nonlinear query with a weight anchor, or None where it has none."""
    for part in parts:
        if part["type"] == "nonlinear_query" and part.get("anchor", "weight") == "weight":
            return str(part.get("form", "preserving"))
    return None


def known_score_surprises(recipe: Recipe, scores: Mapping[str, TaskResult]) -> list[str]:
    """Return one sentence for each score of the base that lies outside what is published."""
    model, plain = recipe.model, recipe.evaluation.plain
    return check_known_scores(model.full_name, model.revision, model.dtype, scores, plain=plain)


def _tuning(results: ComparisonResults) -> Iterator[str]:
    if results.tuning is None:
        yield from filter(None, [rates_sentence(results)])
        return
    for name, choice in results.tuning.chosen.items():
        if not choice.is_tuned:
            yield f"{name}: all {choice.trials} trials of tuning diverged; its runs take the lowest rate, untuned."
        elif choice.edge is not None and choice.at is None:
            rate = f"{choice.values.get('lr'):g}"
            beyond = "lower" if choice.edge == "lowest" else "higher"
            yield (
                f"{name}: its best learning rate, {rate}, is the {choice.edge} of the "
                f"{len(results.tuning.rates_of(name))} that were tried, so a {beyond} one may be better."
            )


def _sizes(recipe: Recipe, results: ComparisonResults, references: Mapping[str, list[str]]) -> Iterator[str]:
    own = controls_of(recipe.methods)
    smaller = {(name, each.name) for name, controls in own.items() for each in controls if not each.has_its_size}
    sizes = {name: method.trainable for name, method in results.methods.items()}
    unmatched: dict[str, list[str]] = {}
    for name, controls in references.items():
        for control in controls:
            if (name, control) in smaller:  # a part of the method, smaller by design
                continue
            if control != results.baseline and abs(sizes[control] - sizes[name]) > MATCHED * sizes[name]:
                ratio = f"{name} ({sizes[name]:,}, a ratio of {sizes[control] / sizes[name]:.2f})"
                unmatched.setdefault(control, []).append(ratio)
    for control, others in unmatched.items():
        yield (
            f"{control} has {sizes[control]:,} trainable parameters, which does not match {', '.join(others)}: "
            "a difference between them may be one of size."
        )


def _trainings(methods: Mapping[str, Method]) -> Iterator[str]:
    """Yield what was lost in the trainings: small updates, diverged runs, updates left out, text not seen."""
    for name, method in methods.items():
        trains = [run.train for run in method.runs.values() if run.train]
        shares = [share for train in trains for share in train.update_survival.values()]
        if shares and min(shares) < SURVIVAL:
            yield (
                f"{name}: as little as {min(shares):.0%} of a tensor's weights really changed in an optimiser step; "
                "the other updates were too small for the weights' dtype."
            )
    trained = [(name, seed, run.train) for name, method in methods.items() for seed, run in method.runs.items()]
    for name, seed, train in trained:
        if train is None:
            continue
        if train.diverged_step is not None:
            step = train.diverged_step
            yield f"{name}, seed {seed}: diverged at step {step}; it has no scores, and no comparison counts it."
        if train.skipped_steps:
            yield (
                f"{name}, seed {seed}: {train.skipped_steps} updates were left out, their loss or gradient not being "
                "finite."
            )
        if train.stopped_early:
            yield f"{name}, seed {seed}: stopped early after {train.steps} steps, so it saw less text."


def _settings(recipe: Recipe, results: ComparisonResults) -> Iterator[str]:
    methods = results.methods
    for name, method in methods.items():
        if method.form == "literal":
            yield (
                f"{name} is the literal form Q = (xW_Q + f(x))/2, which halves the pretrained attention logits at "
                "step 0; it does not start from the base model."
            )
    training = recipe.training
    if training.trainable_dtype != "float32":
        others = ", ".join(f"{group} in {dtype}" for group, dtype in training.trainable_dtypes.items())
        kept = f"{training.trainable_dtype} ({others})" if others else training.trainable_dtype
        yield f"What is trained is kept in {kept}, which loses small updates."
    if results.provenance.get("matmul") == "fp32":
        yield f"Matrix products: {PRODUCTS['fp32']}."
    commits = {run.commit or "unknown" for method in methods.values() for run in method.runs.values()}
    commits |= {trial.commit or "unknown" for trial in results.tuning.trials} if results.tuning else set()
    if len(commits) > 1:
        yield f"The runs were made with several commits of hfpatch: {', '.join(sorted(commits))}."
    computed = {
        f"{name}, seed {seed}": run.computed_with for name, each in methods.items() for seed, run in each.runs.items()
    }
    yield from computed_differently({name: values for name, values in computed.items() if values})
