"""results.json: everything that was measured, in the layout that reports and other tools read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hfpatch.evaluation import Comparison, TaskResult, load_tasks, primary_aggregations
from hfpatch.evaluation import compare as compare_records
from hfpatch.evaluation.comparison import CORRECTION
from hfpatch.evaluation.metrics import Aggregation
from hfpatch.recipes.comparison import Recipe
from hfpatch.results.curves import mean_curve
from hfpatch.results.layers import mean_series, patch_norms
from hfpatch.results.schema import ComparisonResults, Match, Method, Parameters, Run, Task
from hfpatch.runs.bench import Bench
from hfpatch.runs.cautions import cautions, form_of, scores_of
from hfpatch.runs.folder import RunFolder
from hfpatch.runs.references import references
from hfpatch.runs.runs import diverged_step
from hfpatch.support.files import read_json
from hfpatch.support.provenance import Clock, provenance


def planned_runs(recipe: Recipe) -> list[tuple[str, int]]:
    """Return every (method, seed), the baseline first and once: nothing in it depends on a seed."""
    others = [name for name in recipe.methods if name != recipe.baseline]
    return [(recipe.baseline, 0), *((name, seed) for seed in recipe.training.seeds for name in others)]


def collect(bench: Bench, folder: RunFolder, clock: Clock, *, complete: bool) -> ComparisonResults:
    """Return the results of all complete runs and, where the comparison is complete, the paired tests."""
    recipe = bench.recipe.model_dump(mode="json")
    methods = {name: _method(bench, folder, name) for name in bench.recipe.methods}
    training = bench.recipe.training
    held_out = {"held_out": bench.held_out.to_json()} if bench.held_out else {}
    results = ComparisonResults(
        name=recipe["name"],
        description=recipe["description"],
        protocol=recipe["protocol"],
        complete=complete,
        provenance={**provenance(clock), "matmul": bench.matmul},
        model={
            "name": bench.base.name,
            "revision": bench.base.revision,
            "sha256": bench.base.sha256,
            "dtype": bench.recipe.model.dtype,
            "model_type": bench.base.model.config.model_type,
            "parameters": bench.sizes[bench.recipe.baseline].base,
        },
        data=bench.blocks.to_json() | held_out,
        plan={
            str(seed): {"sha256": plan.sha256, "steps": training.steps, "batch_size": training.batch_size}
            for seed, plan in bench.plans.items()
        },
        training=recipe["training"],
        evaluation=recipe["evaluation"],
        tasks=_tasks(methods),
        methods=methods,
        comparisons=_comparisons(bench, folder) if complete else [],
        correction=CORRECTION,
    )
    warned = cautions(bench.recipe, results, references(bench.recipe)) if complete else []
    return results.model_copy(update={"warnings": warned})


def _method(bench: Bench, folder: RunFolder, name: str) -> Method:
    size, match = bench.sizes[name], bench.methods[name].match
    paths = {seed: folder.run(method, seed) for method, seed in planned_runs(bench.recipe) if method == name}
    done = {seed: path for seed, path in paths.items() if path.result.is_file()}
    return Method(
        parts=bench.recipe.methods[name],
        parameters=Parameters(trainable=size.trainable, added=size.added, base=size.base),
        match=Match.model_validate(match.to_json()) if match else None,
        form=form_of(bench.recipe.methods[name]),
        runs={seed: Run.model_validate(read_json(path.result)) for seed, path in done.items()},
        curve=mean_curve(path.metrics for path in done.values()),
        layers=mean_series(series for path in done.values() for series in patch_norms(path.patch)),
    )


def _tasks(methods: Mapping[str, Method]) -> dict[str, Task]:
    runs = (run for method in methods.values() for run in method.runs.values())
    scores = next((run.evaluation for run in runs if run.evaluation), {})
    return {task: Task.model_validate(score.to_json()) for task, score in scores.items()}


def _comparisons(bench: Bench, folder: RunFolder) -> list[Comparison]:
    records: dict[str, dict[int, Path]] = {}
    for method, seed in planned_runs(bench.recipe):
        result = folder.run(method, seed).result
        if result.is_file() and diverged_step(read_json(result)["train"]) is None:
            records.setdefault(method, {})[seed] = folder.run(method, seed).evaluations
    recipe = bench.recipe
    scores = scores_of(read_json(folder.run(recipe.baseline, 0).result))
    return compare_records(
        records,
        tasks=scores,
        references={
            method: [other for other in others if other in records]
            for method, others in references(recipe).items()
            if method in records
        },
        baseline=recipe.baseline,
        aggregations=aggregations(recipe, scores),
    )


def aggregations(recipe: Recipe, scores: dict[str, TaskResult]) -> dict[str, Aggregation]:
    """Return the function from documents to the primary score of each of a recipe's tasks."""
    tasks = load_tasks(recipe.evaluation.tasks, data_dir=recipe.data_dir, **recipe.evaluation.task_options)
    return primary_aggregations(tasks, scores)
