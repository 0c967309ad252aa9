"""results.json: everything that was measured, in the layout that reports and other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfpatch.evaluation import TaskResult, load_tasks, primary_aggregations
from hfpatch.evaluation import compare as compare_records
from hfpatch.evaluation.comparison import CORRECTION
from hfpatch.evaluation.metrics import Aggregation
from hfpatch.recipes.comparison import Recipe
from hfpatch.runs.cautions import cautions, form_of, scores_of
from hfpatch.runs.folder import RunFolder, RunPaths
from hfpatch.runs.outcome import diverged_step
from hfpatch.runs.plan import planned_runs
from hfpatch.runs.references import references
from hfpatch.runs.setup import ComparisonSetup
from hfpatch.support.files import read_json
from hfpatch.support.provenance import Clock, provenance

SCHEMA = 1


def collect(bench: ComparisonSetup, folder: RunFolder, clock: Clock, *, complete: bool) -> dict[str, Any]:
    """Return what results.json holds: all complete runs and, where the comparison is complete, the paired tests."""
    recipe = bench.recipe.model_dump(mode="json")
    methods = {name: _method(bench, folder, name) for name in bench.recipe.methods}
    results: dict[str, Any] = {
        "schema": SCHEMA,
        **{key: recipe[key] for key in ("name", "description", "protocol")},
        "complete": complete,
        "provenance": {**provenance(clock), "matmul": bench.matmul},
        "model": _model(bench),
        "data": _data(bench),
        "plan": {str(seed): _plan(bench, seed) for seed in bench.plans},
        "training": recipe["training"],
        "evaluation": recipe["evaluation"],
        "tasks": _tasks(methods),
        "methods": methods,
        "comparisons": _comparisons(bench, folder) if complete else [],
        "correction": CORRECTION,
    }
    return {**results, "warnings": cautions(bench.recipe, results, references(bench.recipe)) if complete else []}


def _data(bench: ComparisonSetup) -> dict[str, Any]:
    held_out = bench.held_out
    return bench.blocks.to_json() | ({"held_out": held_out.to_json()} if held_out else {})


def _method(bench: ComparisonSetup, folder: RunFolder, name: str) -> dict[str, Any]:
    size, match = bench.sizes[name], bench.methods[name].match
    paths = {run.seed: run.result for run in planned_runs(bench.recipe, folder.root) if run.variant == name}
    parts = bench.recipe.methods[name]
    return {
        "parts": parts,
        "parameters": {"trainable": size.trainable, "added": size.added, "base": size.base},
        "match": match.to_json() if match else None,
        "form": form_of(parts),
        "runs": {str(seed): read_json(path) for seed, path in paths.items() if path.is_file()},
    }


def _model(bench: ComparisonSetup) -> dict[str, Any]:
    base = bench.base
    return {
        "name": base.name,
        "revision": base.revision,
        "sha256": base.sha256,
        "dtype": bench.recipe.model.dtype,
        "model_type": base.model.config.model_type,
        "parameters": bench.sizes[bench.recipe.baseline].base,
    }


def _plan(bench: ComparisonSetup, seed: int) -> dict[str, Any]:
    training = bench.recipe.training
    return {"sha256": bench.plans[seed].sha256, "steps": training.steps, "batch_size": training.batch_size}


def _tasks(methods: dict[str, Any]) -> dict[str, Any]:
    runs = (run for method in methods.values() for run in method["runs"].values())
    scores: dict[str, Any] = next((run["evaluation"] for run in runs), {})
    keys = ("primary", "higher_is_better", "n", "data_sha256", "version")
    return {task: {key: score[key] for key in keys} for task, score in scores.items()}


def _comparisons(bench: ComparisonSetup, folder: RunFolder) -> list[dict[str, Any]]:
    records: dict[str, dict[int, Path]] = {}
    for run in planned_runs(bench.recipe, folder.root):
        if run.result.is_file() and diverged_step(read_json(run.result)["train"]) is None:
            records.setdefault(run.variant, {})[run.seed] = RunPaths(run.folder).evaluations
    recipe = bench.recipe
    scores = scores_of(read_json(folder.run(recipe.baseline, 0).result))
    found = compare_records(
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
    return [each.to_json() for each in found]


def aggregations(recipe: Recipe, scores: dict[str, TaskResult]) -> dict[str, Aggregation]:
    """Return the function from documents to the primary score of each of a recipe's tasks."""
    tasks = load_tasks(recipe.evaluation.tasks, data_dir=recipe.data_dir, **recipe.evaluation.task_options)
    return primary_aggregations(tasks, scores)
