"""results.json: everything that was measured, in the layout that reports and other tools read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hfpatch.evaluation import Comparison, all_aggregations
from hfpatch.evaluation import compare as compare_records
from hfpatch.evaluation.reading import Reader
from hfpatch.evaluation.selection import select
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pairs import Question, by_question, is_lora, references
from hfpatch.results.comparison import read_match
from hfpatch.results.held_out import HELD_OUT, NATS_PER_TOKEN
from hfpatch.results.identity import facts_of_base
from hfpatch.results.records import write_published
from hfpatch.results.schema import ComparisonResults, KeptAnswers, LayerSeries, Method, Parameters, Run, Task, Tuning
from hfpatch.results.series import mean_curve, mean_series
from hfpatch.runs.cautions import cautions, form_of, scores_of
from hfpatch.runs.folder import RunFolder, RunPaths
from hfpatch.runs.frontier import frontier_of
from hfpatch.runs.plan import PlannedRun, planned_runs
from hfpatch.runs.retention import collect_retention, retention_of_run, retention_records
from hfpatch.runs.setup import ComparisonSetup
from hfpatch.runs.tuning import collect_tuning
from hfpatch.support.files import read_json
from hfpatch.support.provenance import Clock, provenance


def collect(setup: ComparisonSetup, folder: RunFolder, clock: Clock, *, complete: bool) -> ComparisonResults:
    """Return the results of all complete runs and, where the comparison is complete, the paired tests."""
    recipe = setup.recipe.model_dump(mode="json")
    runs = [run for run in planned_runs(setup.recipe, folder.root) if run.result.is_file()]
    methods = {name: _method(setup, name, runs) for name in setup.recipe.methods}
    training = setup.recipe.training
    held_out = {"held_out": setup.held_out.to_json() | _base_loss(setup, folder)} if setup.held_out else {}
    results = ComparisonResults(
        name=recipe["name"],
        description=recipe["description"],
        protocol=recipe["protocol"],
        complete=complete,
        provenance={**provenance(clock), "matmul": setup.matmul},
        model={
            **setup.base.facts,
            "dtype": setup.recipe.model.dtype,
            "model_type": setup.base.model.config.model_type,
            "parameters": setup.sizes[setup.recipe.baseline].base,
            **({"loading": loading} if (loading := setup.recipe.model.describe()) else {}),
            "identity": facts_of_base(setup.shared),
        },
        data=setup.blocks.to_json() | held_out,
        plan={
            str(seed): {"sha256": setup.plans[seed].sha256, "steps": training.steps, "batch_size": training.batch_size}
            for seed in training.seeds
        },
        training=_training(recipe),
        tuning=_tuning(setup),
        evaluation=recipe["evaluation"],
        tasks=_tasks(methods),
        methods=methods,
        questions=_questions(setup.recipe),
        comparisons=_comparisons(setup, folder, methods) if complete else [],
        retention=collect_retention(setup, folder, methods, complete=complete),
        kept=_kept(setup, folder, methods) if complete else None,
    )
    warned = cautions(setup.recipe, results, references(setup.recipe)) if complete else []
    of_data = [f"{caution}." for caution in setup.cautions]
    missed = [f"{name} is left out: {reason}." for name, reason in setup.left_out.items()]
    found: dict[str, Any] = {"warnings": [*of_data, *missed, *warned], "left_out": setup.left_out or None}
    if results.comparisons:
        found["frontier"] = frontier_of(results, _records(folder, methods), all_aggregations(tasks_of(setup.recipe)))
    return results.model_copy(update=found)


def _base_loss(setup: ComparisonSetup, folder: RunFolder) -> dict[str, float]:
    """Return the base's nats per token on the held-out text as ``base_loss``, where its run has measured them."""
    path = folder.run(setup.recipe.baseline, 0).result
    score = scores_of(read_json(path)).get(HELD_OUT) if path.is_file() else None
    return {} if score is None else {"base_loss": score.metrics[NATS_PER_TOKEN]}


def _method(setup: ComparisonSetup, name: str, runs: Sequence[PlannedRun]) -> Method:
    size, match = setup.sizes[name], setup.methods[name].match
    paths = {run.seed: RunPaths(run.folder) for run in runs if run.variant == name}
    done = {run.seed: read_json(run.result) | retention_of_run(setup, run) for run in runs if run.variant == name}
    layers = (LayerSeries.model_validate(series) for result in done.values() for series in result["layers"])
    return Method(
        label=setup.recipe.labels.get(name),
        parts=setup.recipe.methods[name],
        parameters=Parameters(trainable=size.trainable, added=size.added, base=size.base),
        match=read_match(match.to_json()) if match else None,
        form=form_of(setup.recipe.methods[name]),
        runs={seed: Run.model_validate(result) for seed, result in done.items()},
        curve=mean_curve(path.metrics for path in paths.values()),
        layers=mean_series(layers),
    )


def _training(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's section; without the rate where tuning chooses one for each method."""
    section = dict(recipe["training"])
    return section if recipe["tuning"] is None else {key: section[key] for key in section if key != "lr"}


def _tuning(setup: ComparisonSetup) -> Tuning | None:
    if setup.tuning_text is None:
        return None
    return collect_tuning(setup.tuning, setup.recipe, setup.tuning_text, setup.plans[setup.recipe.tuning_seed])


def _tasks(methods: Mapping[str, Method]) -> dict[str, Task]:
    runs = (run for method in methods.values() for run in method.runs.values())
    scores = next((run.evaluation for run in runs if run.evaluation), {})
    return {task: Task.model_validate(score.to_json()) for task, score in scores.items()}


def _questions(recipe: Recipe) -> dict[Question, list[tuple[str, str]]]:
    """Return the pairs of each question, all that the recipe declares."""
    declared = [(name, other) for name, others in references(recipe).items() for other in others]
    loras = [name for name, parts in recipe.methods.items() if is_lora(parts)]
    return by_question(declared, recipe.baseline, loras)


def publish_values(folder: RunFolder, results: ComparisonResults) -> None:
    """Write the values of all documents beside complete results, for whoever has the folder without its runs."""
    records = {**_records(folder, results.methods), **retention_records(folder, results.methods)}
    reader, (path, *_) = Reader(), [path for own in records.values() for path in own.values()]  # documents are alike
    scores = next(iter(run.evaluation for method in results.methods.values() for run in method.runs.values()))
    groups = {task: reader.read_groups(path, score) for task, score in scores.items()}
    points = results.retention.points if results.retention is not None else []
    made = [*results.comparisons, *(each for point in points for each in point.comparisons)]
    measures = [(each.task, each.metric) for each in made]
    write_published(folder.root, records, measures, {task: own for task, own in groups.items() if own is not None})


def _records(folder: RunFolder, methods: Mapping[str, Method]) -> dict[str, dict[int, Path]]:
    """Return the folder of the records of each run that has scores, by method and seed."""
    scored = {name: [seed for seed in each.runs if seed not in each.diverged] for name, each in methods.items()}
    return {
        name: {seed: folder.run(name, seed).evaluations for seed in seeds} for name, seeds in scored.items() if seeds
    }


def _comparisons(setup: ComparisonSetup, folder: RunFolder, methods: Mapping[str, Method]) -> list[Comparison]:
    """Return the paired differences by every measure."""
    recipe = setup.recipe
    return compare_records(
        _records(folder, methods),
        tasks=methods[recipe.baseline].runs[0].evaluation,
        references=_compared(recipe, methods),
        baseline=recipe.baseline,
        aggregations=all_aggregations(tasks_of(recipe)),
    )


def _kept(setup: ComparisonSetup, folder: RunFolder, methods: Mapping[str, Method]) -> list[KeptAnswers]:
    from hfpatch.evaluation.retention import kept_of

    recipe = setup.recipe
    tasks = methods[recipe.baseline].runs[0].evaluation
    return kept_of(_records(folder, methods), tasks=tasks, baseline=recipe.baseline, methods=recipe.trained)


def _compared(recipe: Recipe, methods: Mapping[str, Method]) -> dict[str, list[str]]:
    """Return the references of each method, where both have a run with scores."""
    scored = {name for name, each in methods.items() if len(each.diverged) < len(each.runs)}
    found = {name: [other for other in others if other in scored] for name, others in references(recipe).items()}
    return {name: others for name, others in found.items() if name in scored}


def compares_what_it_should(recipe: Recipe, results: ComparisonResults) -> bool:
    """Return whether complete results have the questions and comparisons of today; an older version's may not."""
    recipe = (
        recipe.only([name for name in recipe.trained if name not in results.left_out]) if results.left_out else recipe
    )
    due = {(name, other) for name, others in _compared(recipe, results.methods).items() for other in others}
    made = {(each.method, each.reference) for each in results.comparisons}
    same = made == due and results.questions == _questions(recipe) and results.kept is not None
    return not results.tasks or same


def tasks_of(recipe: Recipe) -> dict[str, Any]:
    """Return lm-eval's tasks of a recipe by name."""
    return select(recipe.evaluation, recipe.data_dir).tasks
