"""One run: a method and a seed, trained, saved and evaluated; each stage leaves a file that marks it as done."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import TaskResult, evaluate
from hfpatch.runs.bench import Bench
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.progress import Progress
from hfpatch.support.files import read_json, write_json
from hfpatch.support.provenance import checkout_state
from hfpatch.surgery.folder import load_patch, save_patch
from hfpatch.surgery.patch import patch
from hfpatch.training.probe import train_probe
from hfpatch.training.records import TrainResult


def train_run(bench: Bench, method: str, seed: int, paths: RunPaths, *, resume: bool, progress: Progress) -> None:
    """Train a method with a seed and save its patch, unless it diverged; afterwards the base is as it was."""
    state = PartialState()
    progress.started(run_name(method, seed), bench.recipe.training.steps)
    with bench.patched(method, lambda model, built: patch(model, built.configs, seed=seed)) as model:
        outcome = _train(bench, model, method, seed, paths, resume=resume, progress=progress)
        if state.is_main_process:
            if outcome.diverged_step is None:
                save_patch(model, paths.patch)
            write_json(paths.training, {**outcome.to_json(), "identity": bench.identify(method, seed)})
        state.wait_for_everyone()


def _train(
    bench: Bench, model: PreTrainedModel, method: str, seed: int, paths: RunPaths, *, resume: bool, progress: Progress
) -> TrainResult:
    run = run_name(method, seed)
    try:
        return train_probe(
            model,
            settings=bench.recipe.training,
            blocks=bench.blocks,
            plan=bench.plans[seed],
            seed=seed,
            run_dir=paths.root,
            held_out=bench.held_out,
            resume=resume,
            on_step=lambda record: progress.stepped(run, record),
            origin=bench.identify(method, seed),
        )
    except HfpatchError as error:
        raise HfpatchError(f"{run}: {error}") from error


def evaluate_run(bench: Bench, method: str, seed: int, paths: RunPaths, *, progress: Progress) -> dict[str, Any]:
    """Evaluate a method as it lies on disk, or the bare base, write the run's result and return it.

    A run that diverged has nothing to evaluate, and no scores.
    """
    trained = read_json(paths.training) if paths.training.is_file() else None
    diverged = diverged_step(trained) is not None
    scores = {} if diverged else _scores(bench, method, seed, paths, progress=progress)
    result = {
        "commit": checkout_state()[0],
        "identity": bench.identify(method, seed),
        "train": trained and {key: value for key, value in trained.items() if key != "identity"},
        "evaluation": {task: score.to_json() for task, score in scores.items()},
    }
    write_json(paths.result, result)
    shutil.rmtree(paths.answers, ignore_errors=True)  # they are of use to an interrupted evaluation only
    return result


def diverged_step(trained: Mapping[str, Any] | None) -> int | None:
    """Return the step at which a run, a training.json, diverged; None where it did not or nothing was trained."""
    return None if trained is None else trained.get("diverged_step")


def _scores(bench: Bench, method: str, seed: int, paths: RunPaths, *, progress: Progress) -> dict[str, TaskResult]:
    run, recipe = run_name(method, seed), bench.recipe
    with bench.patched(method, lambda model, _: load_patch(model, paths.patch)) as model:
        model.eval()
        return evaluate(
            model,
            bench.base.tokenizer,
            settings=recipe.evaluation,
            data_dir=recipe.data_dir,
            records_dir=paths.evaluations,
            answers_dir=paths.answers,
            base_sha256=bench.base.sha256,
            on_task=lambda task: progress.evaluating(run, task),
            on_scored=lambda task, done, total: progress.scored(run, task, done, total),
        )


def run_name(method: str, seed: int) -> str:
    """Return how a run is called where people read it."""
    return f"{method} · seed {seed}"
