"""Measure a saved patch on text that training should not change, and the patch at smaller scales on everything.

``retention.json`` in a run's folder has the scores on the texts of ``retention``, whose records are beside those of the
tasks; ``rewind/<scale>/result.json`` has those of the patch at a scale, with its loss on the text of tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.models.attention import fast_attention
from hfpatch.nn.matmul import fast_matmul
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.recipes.retention import task_of
from hfpatch.results.layout import Method
from hfpatch.results.parts import Task, TaskResult, task_results
from hfpatch.results.records import loss_of, write_values
from hfpatch.results.retention import KL, Retention, RetentionPoint
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.identity import check_measured, check_run
from hfpatch.runs.plan import Unit
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Measurement, RunResult, Trained
from hfpatch.runs.setup import ComparisonSetup, Setup
from hfpatch.support.provenance import checkout_state
from hfpatch.support.ranks import Ranks
from hfpatch.training.processes import start_ranks
from hfpatch.training.retention import document_changes
from hfpatch.training.validation import document_losses, start_losses

Array = npt.NDArray[np.float64]


def measure_further(unit: Unit, setup: ComparisonSetup, progress: Progress) -> str:
    """Complete a ``retain`` or a ``rewind``, and return its scores in a line."""
    run, marker, ranks = unit.run, unit.marker, start_ranks()
    assert marker is not None
    identity = setup.identify_retention(run)
    if not unit.is_complete():
        check_run(run.folder, setup.identify(run))  # code may have changed since, in another process
        training = run.paths.training
        diverged = training.is_file() and Trained.read(training).diverged_step is not None
        measured = Measurement() if diverged else _measure(unit, setup, progress, ranks)
        if ranks.is_first:
            measured.model_copy(update={"commit": checkout_state()[0], "identity": identity}).write(marker)
        PartialState().wait_for_everyone()
    measured = check_measured(marker, identity)
    scores = measured.evaluation.items()
    parts = [f"{task} KL {score.metrics[KL]:.4g}" for task, score in scores if KL in score.metrics]
    if measured.tuning_loss is not None:
        parts.insert(0, f"at {unit.scale:g} loss on the text of tuning {measured.tuning_loss:.4f}")
    return ", ".join(parts) or "diverged"


def _measure(unit: Unit, setup: ComparisonSetup, progress: Progress, ranks: Ranks) -> Measurement:
    """Measure the texts of a unit, and write its records."""
    from hfpatch.evaluation.retention import retained_result

    run, paths = unit.run, unit.run.paths
    assert unit.marker is not None
    folder = paths.evaluations if unit.action == "retain" else unit.marker.parent
    records = folder if ranks.is_first else None
    tuning_loss: float | None = None
    scores: dict[str, TaskResult] = {}

    with setup.patched(run, paths.patch, scale=unit.scale) as model:
        model.eval()
        if unit.action == "rewind" and setup.tuning_text is not None:
            progress.evaluating(run.name, f"text of tuning at {unit.scale:g}")
            tuning_loss = loss_of(by_document(document_losses, model, setup, setup.tuning_text, ranks).tolist())
        for name, blocks in setup.retained.items() if unit.action == "retain" or unit.scale != 1 else ():
            progress.evaluating(run.name, task_of(name))
            changes = by_document(document_changes, model, setup, blocks, ranks)
            scores[task_of(name)] = retained_result(task_of(name), changes, setup.retained_documents[name], records)
        if unit.action == "rewind" and unit.scale != 1 and setup.held_out is not None:
            progress.evaluating(run.name, HELD_OUT)
            scores[HELD_OUT] = measure_held_out(model, setup, records, ranks)
    if records is not None and scores:
        scored = RunResult.read(run.paths.result).evaluation if unit.action == "retain" else ()
        write_values(records, [*scored, *scores])
    return Measurement(tuning_loss=tuning_loss, evaluation=scores)


def measure_held_out(
    model: PreTrainedModel, setup: Setup, records: Path | None, ranks: Ranks, *, with_starts: bool = False
) -> TaskResult:
    """Return the loss on held-out text, and write that of each document into the folder of ``records``.

    ``with_starts`` measures those at the starts of documents and of blocks, too.
    """
    from hfpatch.evaluation.retention import held_out_result

    assert setup.held_out is not None
    losses = by_document(document_losses, model, setup, setup.held_out, ranks)
    starts = by_document(start_losses, model, setup, setup.held_out, ranks) if with_starts else None
    return held_out_result(losses, setup.held_out_documents, records, starts=starts)


def by_document(
    measure: Callable[..., Array], model: PreTrainedModel, setup: Setup, blocks: TokenBlocks, ranks: Ranks
) -> Array:
    """Return what ``measure`` finds of each document (documents, ...), which the ranks measure together."""
    training, shares = setup.recipe.training, ranks.shares
    with fast_attention(), fast_matmul(model, library=setup.matmul):
        measured = measure(
            model,
            blocks,
            batch_size=training.micro_batch_size or training.batch_size,
            autocast=training.autocast,
            process=ranks.index if shares else 0,
            processes=ranks.count if shares else 1,
        )
    return np.asarray(np.sum(ranks.everyone(measured), axis=0)) if shares else measured


def collect_retention(
    setup: ComparisonSetup, out: Path, methods: Mapping[str, Method], tasks: Mapping[str, Task], *, complete: bool
) -> Retention | None:
    """Return what training changed on the texts of ``retention``; differences only where the comparison is complete.

    ``tasks`` are those of the results.
    """
    from hfpatch.evaluation.reading import Records
    from hfpatch.evaluation.retention import compare_points

    recipe = setup.recipe
    if recipe.retention is None:
        return None
    base = methods[recipe.baseline].runs.get(0)
    file = RunPaths.of(out, recipe.baseline, 0).retention
    stored = Measurement.read(file).evaluation if file.is_file() else {}
    scored = {task: score.shared for task, score in stored.items()}
    points: list[RetentionPoint] = []
    for name in recipe.trained:
        runs = [run for run in methods[name].runs.values() if run.diverged_step is None]
        for scale in sorted({*recipe.rewind, 1.0}):
            rewound = [(run.rewound or {}).get(f"{scale:g}") for run in runs]
            losses = [one.tuning_loss for one in rewound if one is not None and one.tuning_loss is not None]
            loss = float(np.mean(losses)) if 0 < len(losses) == len(runs) else None  # other scales have all seeds
            points.append(RetentionPoint(method=name, scale=scale, tuning_loss=loss))
    if complete and base is not None:
        records = Records(retention_records(out, methods), recipe.baseline)
        held_out = task_results(tasks, base.evaluation).get(HELD_OUT)
        points = compare_points(points, records, task_results(scored, base.retention or {}), held_out)
    texts = {
        task_of(name): {**blocks.to_json(), "bytes": int(setup.retained_documents[name].bytes.sum())}
        for name, blocks in setup.retained.items()
    }
    kept = list(recipe.retention.tasks or recipe.evaluation.tasks)
    return Retention(texts=texts, scored=scored, tasks=kept, points=points)


def retention_records(out: Path, methods: Mapping[str, Method]) -> dict[str, dict[int, Path]]:
    """Return the folder of the records of each method, at each scale of its patch, by `point_name` and seed."""
    from hfpatch.evaluation.retention import point_name

    records: dict[str, dict[int, Path]] = {}
    for name, method in methods.items():
        for seed, run in method.runs.items():
            paths = RunPaths.of(out, name, seed)
            if run.retention:
                records.setdefault(name, {})[seed] = paths.evaluations
            for scale, rewound in (run.rewound or {}).items():
                if rewound.evaluation:
                    point = point_name(name, float(scale))
                    records.setdefault(point, {})[seed] = paths.rewound(float(scale)).parent
    return records
