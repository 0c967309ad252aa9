"""The units of a comparison: tune a method, train it, evaluate it, check the baseline's scores.

lm-eval and what it imports, seconds of it, are imported where an evaluation begins.
"""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.errors import HfpatchError
from hfpatch.nn.matmul import fast_matmul
from hfpatch.results.held_out import HELD_OUT
from hfpatch.results.identity import task_identity
from hfpatch.results.series import patch_norms
from hfpatch.runs.folder import RunFolder, RunPaths, diverged_step, summarise
from hfpatch.runs.identity import check_run, check_scores, check_seeds
from hfpatch.runs.plan import PlannedRun, Unit
from hfpatch.runs.progress import Progress
from hfpatch.runs.setup import ComparisonSetup
from hfpatch.runs.tuning import Outcome, values_text
from hfpatch.support.files import read_json, write_json
from hfpatch.support.provenance import checkout_state
from hfpatch.support.ranks import Ranks
from hfpatch.surgery.folder import load_patch, save_patch
from hfpatch.surgery.patch import patch
from hfpatch.training.attention import attention_by_document
from hfpatch.training.probe import train_probe
from hfpatch.training.processes import start_ranks
from hfpatch.training.validation import document_losses


def complete(unit: Unit, setup: ComparisonSetup, progress: Progress) -> None:
    """Bring a unit of a comparison to its end, doing only what is not done yet.

    Raises:
        HfpatchError: if it fails, naming the run.
    """
    run = unit.run
    try:
        if unit.action == "check_baseline":
            _check_baseline(setup, run)
        elif unit.action == "evaluate":
            if not unit.is_complete():
                _evaluate(setup, run, progress)
            progress.finished(run.name, summarise(read_json(run.result)))
        elif unit.action == "tune":
            if setup.tuning.needs(run):
                if not unit.is_complete():
                    _train(setup, run, progress)
                    progress.finished(run.name, Outcome(run, read_json(RunPaths(run.folder).training)).describe())
                _remove_checkpoints(run)
        elif unit.is_complete() and setup.recipe.tuning is not None and not _is_of_choice(setup, run):
            raise HfpatchError(
                "was trained before the rates were extended, and tuning now chooses "
                f"{values_text(setup.tuning.chosen(run.variant))}; delete {run.folder} and resume to train it again"
            )
        elif not run.result.is_file():
            if not unit.is_complete():
                _train(setup, run, progress)
            _close_training(setup, run)
    except HfpatchError as error:
        raise HfpatchError(f"{run.name}: {error}") from error


def is_due(unit: Unit, setup: ComparisonSetup) -> bool:
    """Return whether `complete` would train or evaluate something; the units that this one needs are complete."""
    if unit.action == "check_baseline" or unit.is_complete():
        return False
    if unit.action == "tune":
        return setup.tuning.needs(unit.run)
    return unit.action == "evaluate" or not unit.run.result.is_file()


def _train(setup: ComparisonSetup, run: PlannedRun, progress: Progress) -> None:
    """Train a method and save its patch, unless it diverged or is a trial; afterwards the base is as it was."""
    state, paths, settings = PartialState(), RunPaths(run.folder), setup.recipe_of(run).training
    identity = setup.identify(run)
    if not run.point:
        check_seeds(run.folder.parent, identity)
    progress.started(run.name, settings.steps)
    with setup.patched(run, lambda model, method: patch(model, method.configs, seed=run.seed)) as model:
        outcome = train_probe(
            model,
            settings=settings,
            blocks=setup.blocks,
            plan=setup.plans[run.seed],
            seed=run.seed,
            run_dir=run.folder,
            held_out=setup.measured_on(run),
            resume=True,
            on_step=lambda record: progress.stepped(run.name, record),
            origin=identity,
        )
        if state.is_main_process:
            if outcome.diverged_step is None and not run.point:
                save_patch(model, paths.patch)
            made_by = {"commit": checkout_state()[0]} if run.point else {}
            write_json(paths.training, {**outcome.to_json(), **made_by, "identity": identity})
        state.wait_for_everyone()


def _close_training(setup: ComparisonSetup, run: PlannedRun) -> None:
    """Remove the checkpoints of a complete training, and warn if it diverged."""
    paths = RunPaths(run.folder)
    if not PartialState().is_main_process:
        return
    if not setup.recipe.training.keep_finished:
        _remove_checkpoints(run)
    if (step := diverged_step(read_json(paths.training))) is not None:
        warnings.warn(
            f"{run.name}: diverged at step {step}: it has no patch and no scores, and is left out of the comparisons; "
            "a lower learning rate may help, and training.on_bad_loss=stop names the blocks of the step",
            stacklevel=2,
        )


def _remove_checkpoints(run: PlannedRun) -> None:
    if PartialState().is_main_process:
        shutil.rmtree(RunPaths(run.folder).checkpoints, ignore_errors=True)


def _is_of_choice(setup: ComparisonSetup, run: PlannedRun) -> bool:
    """Whether a run that is trained was trained at the values that tuning chooses."""
    identity = read_json(RunPaths(run.folder).training).get("identity")
    return bool(identity == setup.identify(run))


def _evaluate(setup: ComparisonSetup, run: PlannedRun, progress: Progress) -> None:
    """Evaluate the bare base or a saved patch, and write the run's result; a run that diverged has no scores."""
    from hfpatch.evaluation import evaluate
    from hfpatch.evaluation.cache import computed_with
    from hfpatch.evaluation.held_out import held_out_result

    paths, recipe, ranks = RunPaths(run.folder), setup.recipe, start_ranks()
    trained = read_json(paths.training) if paths.training.is_file() else None
    identity = setup.identify(run)
    if trained is not None:
        check_run(run.folder, identity)  # code may have changed since, in another process
    scores: dict[str, Any] = {}
    computed: dict[str, Any] = {}
    if diverged_step(trained) is None:
        with setup.patched(run, lambda model, _: load_patch(model, paths.patch)) as model:
            model.eval()
            if setup.held_out is not None:
                progress.evaluating(run.name, HELD_OUT)
                losses = _losses_by_document(model, setup, setup.held_out, ranks)
                records = paths.evaluations if ranks.is_first else None
                scores[HELD_OUT] = held_out_result(losses, setup.held_out_documents, records)
            scores = evaluate(
                model,
                setup.base.tokenizer,
                settings=recipe.evaluation,
                data_dir=recipe.data_dir,
                scored=scores,
                records_dir=paths.evaluations,
                answers_dir=paths.answers,
                base_sha256=setup.base.sha256,
                on_task=lambda task: progress.evaluating(run.name, task),
                on_scored=lambda task, done, total: progress.scored(run.name, task, done, total),
                ranks=ranks,
            )
            computed = {"computed_with": computed_with(model)}
            baseline = RunFolder(run.folder.parents[2]).run(setup.recipe.baseline, 0)
            check_scores(baseline.result, {task: task_identity(score) for task, score in scores.items()})
    result = {
        "commit": checkout_state()[0],
        "identity": identity,
        **computed,
        "train": trained and {key: value for key, value in trained.items() if key != "identity"},
        "evaluation": {task: score.to_json() for task, score in scores.items()},
        "layers": [series.to_json() for series in patch_norms(paths.patch)],
    }
    if ranks.is_first:
        write_json(paths.result, result)
    PartialState().wait_for_everyone()


def _losses_by_document(
    model: PreTrainedModel, setup: ComparisonSetup, blocks: TokenBlocks, ranks: Ranks
) -> npt.NDArray[np.float64]:
    """Return nats and tokens (documents, 2) of each document, which the ranks measure together."""
    training = setup.recipe.training
    with attention_by_document(), fast_matmul(model, library=setup.matmul):
        own = document_losses(
            model,
            blocks,
            batch_size=training.micro_batch_size or training.batch_size,
            autocast=training.autocast,
            process=ranks.index if ranks.shares else 0,
            processes=ranks.count if ranks.shares else 1,
        )
    return np.sum(ranks.everyone(own), axis=0) if ranks.shares else own


def _check_baseline(setup: ComparisonSetup, run: PlannedRun) -> None:
    """Stop before any training if the base scores outside what is known of it, unless the recipe allows that.

    Likewise if a task's metric cannot be used to compare methods.
    """
    from hfpatch.evaluation import all_aggregations, check_comparable
    from hfpatch.runs.cautions import known_score_surprises, scores_of
    from hfpatch.runs.results import tasks_of

    result = read_json(run.result)
    scores = scores_of(result)
    check_comparable(RunPaths(run.folder).evaluations, scores, all_aggregations(tasks_of(setup.recipe)))
    surprises = known_score_surprises(setup.recipe, scores)
    if surprises and not setup.recipe.evaluation.allow_unknown_base:
        raise HfpatchError(f"{' '.join(surprises)} evaluation.allow_unknown_base=true continues anyway")
