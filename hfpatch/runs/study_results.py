"""results.json of a study: every run, and what the seeds say about each variant."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hfpatch.data.tokenise import hash_tokenizer
from hfpatch.evaluation.stats import Estimate, holm, over_seeds
from hfpatch.models.describe import describe_query
from hfpatch.recipes.models import split_architecture
from hfpatch.recipes.pretraining import Point
from hfpatch.runs.plan import PlannedRun, planned_runs
from hfpatch.runs.pretraining import StudySetup
from hfpatch.support.files import read_json
from hfpatch.support.provenance import provenance
from hfpatch.training.diagnostics import DiagnosticsFile
from hfpatch.training.records import MetricsFile

Curve = dict[int, float]
"""The evaluation loss after each step at which it was measured."""


def collect_study(bench: StudySetup) -> dict[str, Any]:
    """Return what results.json holds, of all runs that are there.

    For each variant the best point of its sweep is the one of lowest mean loss at which every seed came to the end.
    Every row is compared with the baseline's best point by its relative improvement with each seed,

        r_s = (L_baseline,s - L_s) / L_baseline,s,

    whose mean over seeds has a 95 % interval and a p-value from Student's t. The p-values of the variants' best rows
    are corrected for their number by Holm's method.
    """
    recipe, corpus = bench.recipe, bench.corpus
    planned = list(planned_runs(recipe, bench.out))
    runs = [_run(run) for run in planned if run.result.is_file()]
    values = recipe.model_dump(mode="json")
    return {
        "kind": "pretraining",
        "complete": len(runs) == len(planned),
        "name": recipe.name,
        "description": recipe.description,
        "provenance": provenance(bench.clock),
        "data": corpus.train.to_json(),
        "evaluation_data": corpus.evaluation.to_json() if corpus.evaluation else None,
        "tokenizer": {"vocab_size": len(corpus.tokenizer), "sha256": hash_tokenizer(corpus.tokenizer)},
        "plans": {str(seed): plan.sha256 for seed, plan in bench.plans.items()},
        "training": values["training"],
        "seeds": list(recipe.seeds),
        "sweep": values["sweep"],
        "baseline": recipe.baseline,
        "variants": {name: _variant(bench, name) for name in recipe.variants},
        "rows": _rows(bench, runs),
        "runs": runs,
    }


def _variant(bench: StudySetup, name: str) -> dict[str, Any]:
    chosen = bench.recipe.variants[name]
    single = bench.recipe.single(name, {}, bench.recipe.seeds[0])
    scratch, _ = split_architecture(single.architecture)
    return {
        "query": describe_query(scratch.query),
        "description": chosen.description,
        "architecture": single.architecture,
        "training": chosen.training,
        "parameters": dict(bench.parameters[name]),
    }


def _run(run: PlannedRun) -> dict[str, Any]:
    result = read_json(run.result)
    step = result["train"]["diverged_step"]
    records = MetricsFile(run.folder / "metrics.jsonl").read()
    return {
        "variant": run.variant,
        "point": run.point,
        "seed": run.seed,
        "outcome": "complete" if step is None else "diverged",
        "diverged_step": step,
        "commit": result["provenance"]["commit"],
        "seconds_per_step": statistics.median(record.seconds for record in records if record.step),
        "train": result["train"],
        "evaluation": [[record.step, record.eval_loss] for record in records if record.eval_loss is not None],
        "diagnostics": DiagnosticsFile(run.folder / "diagnostics.jsonl").values(),
    }


def _rows(bench: StudySetup, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each variant and point, in the recipe's order."""
    recipe = bench.recipe
    rows = [
        _row(variant, point, recipe.seeds, [run for run in runs if (run["variant"], run["point"]) == (variant, point)])
        for variant in recipe.variants
        for point in recipe.points(variant)
    ]
    for variant in recipe.variants:
        best = _best([row for row in rows if row["variant"] == variant])
        if best is not None:
            best["best"] = True
    baseline = next((row for row in rows if row["best"] and row["variant"] == recipe.baseline), None)
    for row in rows:
        if baseline is not None and row is not baseline:
            row["improvement"] = improvement(baseline["loss"]["values"], (row["loss"] or {"values": {}})["values"])
            row["improvement_by_step"] = _improvement_by_step(baseline["curves"], row["curves"])
    _correct(rows)
    return [{key: value for key, value in row.items() if key != "curves"} for row in rows]


def _row(variant: str, point: Point, seeds: Sequence[int], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ended = [run for run in runs if run["outcome"] == "complete"]
    curves: dict[str, Curve] = {str(run["seed"]): dict(run["evaluation"]) for run in runs}
    done = {run["seed"] for run in runs}
    return {
        "variant": variant,
        "point": point,
        "best": False,
        "loss": _loss({str(run["seed"]): run["train"]["final_eval_loss"] for run in ended}),
        "diverged": {str(run["seed"]): run["diverged_step"] for run in runs if run["outcome"] == "diverged"},
        "missing": [seed for seed in seeds if seed not in done],
        "improvement": None,
        "curve": [[step, float(np.mean(losses)), min(losses), max(losses)] for step, losses in _by_step(curves)],
        "improvement_by_step": [],
        "seconds_per_step": statistics.median(run["seconds_per_step"] for run in runs) if runs else None,
        "curves": curves,
    }


def _loss(values: Mapping[str, float]) -> dict[str, Any] | None:
    """Return mean and standard deviation over seeds; the latter None for one seed."""
    if not values:
        return None
    losses = list(values.values())
    sd = float(np.std(losses, ddof=1)) if len(losses) > 1 else None
    return {"mean": float(np.mean(losses)), "sd": sd, "values": dict(values)}


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row of lowest mean loss; where there is a choice, among those that all seeds came to the end of."""
    if len(rows) > 1:
        rows = [row for row in rows if not row["diverged"] and not row["missing"]]
    return min((row for row in rows if row["loss"]), key=lambda row: row["loss"]["mean"], default=None)


def _by_step(curves: Mapping[str, Curve]) -> list[tuple[int, list[float]]]:
    """Return the losses of all seeds at each step that all of them have."""
    steps = set.intersection(*(set(curve) for curve in curves.values())) if curves else set()
    return [(step, [curve[step] for curve in curves.values()]) for step in sorted(steps)]


def _improvement_by_step(baseline: Mapping[str, Curve], curves: Mapping[str, Curve]) -> list[list[float | None]]:
    shared = [seed for seed in curves if seed in baseline]
    steps = {step for step, _ in _by_step({seed: baseline[seed] for seed in shared})}
    found: list[list[float | None]] = []
    for step, _ in _by_step({seed: curves[seed] for seed in shared}):
        if step in steps:
            one = improvement({s: baseline[s][step] for s in shared}, {s: curves[s][step] for s in shared})
            found += [[step, one["mean"], one["low"], one["high"]]] if one else []
    return found


def improvement(baseline: Mapping[str, float], losses: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the relative improvement over the baseline, paired by seed; None without a common seed.

    Args:
        baseline: the baseline's loss with each seed.
        losses: the other's.

    Returns:
        ``mean``; ``low``, ``high`` (95 %) and ``p``, which are None with one seed, or
        where seeds do not differ at all; ``p_holm``, None until corrected.
    """
    ratios = np.array([(baseline[seed] - losses[seed]) / baseline[seed] for seed in losses if seed in baseline])
    if len(ratios) == 0:
        return None
    low = high = p = None
    part = over_seeds(ratios, np.zeros(1), paired=True)
    if part is not None and (part.error > 0 or ratios[0] == 0):
        estimate = Estimate(float(ratios.mean()), (part,))
        (low, high), p = estimate.interval, estimate.p
    return {"mean": float(ratios.mean()), "low": low, "high": high, "p": p, "p_holm": None}


def _correct(rows: Sequence[dict[str, Any]]) -> None:
    """Put in the corrected p-values of the variants, each at its best point."""
    found = [row["improvement"] for row in rows if row["best"] and row["improvement"]]
    tested = [each for each in found if each["p"] is not None]
    for each, p in zip(tested, holm([each["p"] for each in tested]), strict=True):
        each["p_holm"] = p
