"""`compare` and `train`: a recipe in, a run folder out."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate import PartialState

from hfpatch.errors import HfpatchError, nearest
from hfpatch.evaluation import check_comparable
from hfpatch.nn.matmul import pinned_library
from hfpatch.recipes.comparison import Recipe
from hfpatch.reporting import write_report
from hfpatch.runs.bench import Bench, set_up
from hfpatch.runs.cautions import known_score_surprises, scores_of
from hfpatch.runs.folder import RunFolder, no_false_start, open_folder
from hfpatch.runs.identity import check_run, check_shared, stored_library, write_shared
from hfpatch.runs.locks import hold, hold_shared, run_lock
from hfpatch.runs.progress import Progress
from hfpatch.runs.results import aggregations, collect, planned_runs
from hfpatch.runs.runs import diverged_step, evaluate_run, run_name, train_run
from hfpatch.support.files import read_json, write_json
from hfpatch.support.provenance import Clock
from hfpatch.training.processes import start_processes


def compare(recipe: Recipe, out: Path, *, resume: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Train and evaluate every method of a recipe with every seed, compare them and report.

    The base is evaluated first, and compared with its known scores before anything is trained. Each run leaves its
    result when it is complete; with ``resume`` such runs are not repeated. A run that diverges is a result like others,
    without scores: the reports name its step, and the comparisons leave it out.

    Args:
        recipe: what to compare.
        out: the run folder.
        resume: continue the run in ``out``.
        progress: called at every step; None shows nothing.

    Returns:
        The content of ``out/results.json``.

    Raises:
        HfpatchError: if ``out`` may not take this run, or something the recipe names is not as it says.
    """
    if start_processes().num_processes > 1:
        raise HfpatchError("compare runs in one process; launch hfpatch train for each method, then compare --resume")
    folder = open_folder(out, recipe, resume=resume)
    if folder.is_complete():
        write_report(out)
        return folder.read_results()
    locks = _locks(folder, planned_runs(recipe))
    with hold(out, locks), no_false_start(out, locks), pinned_library(stored_library(out)):
        return _compare(recipe, folder, resume=resume, progress=progress or Progress())


def _compare(recipe: Recipe, folder: RunFolder, *, resume: bool, progress: Progress) -> dict[str, Any]:
    clock = _clock(folder)
    bench = _prepare(recipe, folder, resume=resume)
    with pinned_library(bench.matmul):
        for method, seed in planned_runs(recipe):
            _complete_run(bench, folder, method, seed, resume=resume, progress=progress)
            write_json(folder.results, collect(bench, folder, clock, complete=False).to_json())
    results = collect(bench, folder, clock, complete=True).to_json()
    write_json(folder.results, results)
    write_report(folder.root)
    return results


def train(
    recipe: Recipe, method: str, out: Path, *, resume: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Train one method of a recipe with each of its seeds; `compare` with ``resume`` takes up from there.

    Args:
        recipe: where the method stands.
        method: its name.
        out: the run folder.
        resume: continue what lies in ``out``.
        progress: called at every step; None shows nothing.

    Returns:
        The folder of each seed's patch; a seed that diverged has none.

    Raises:
        HfpatchError: as `compare`, and if there is no such method or nothing in it to train.
    """
    if method not in recipe.methods:
        hint = nearest(method, recipe.methods) or f"; there are {', '.join(recipe.methods)}"
        raise HfpatchError(f"no method {method!r} in the recipe{hint}")
    if method == recipe.baseline:
        raise HfpatchError(f"{method!r} is the unchanged model: there is nothing to train")
    state, listener = start_processes(), progress or Progress()
    folder, runs = RunFolder(out), [(method, seed) for seed in recipe.training.seeds]
    locks = _locks(folder, runs)
    with ExitStack() as stack:
        if state.is_main_process:
            open_folder(out, recipe, resume=resume, method=method)
            stack.enter_context(hold(out, locks))
            stack.enter_context(no_false_start(out, locks))
        state.wait_for_everyone()
        stack.enter_context(pinned_library(stored_library(out)))
        bench = _prepare(recipe, folder, resume=resume, method=method)
        stack.enter_context(pinned_library(bench.matmul))
        for _, seed in runs:
            _trained(bench, folder, method, seed, resume=resume, progress=listener)
    trained = [folder.run(method, seed) for _, seed in runs]
    return [paths.patch for paths in trained if diverged_step(read_json(paths.training)) is None]


def _locks(folder: RunFolder, runs: Sequence[tuple[str, int]]) -> list[str]:
    return [run_lock(folder.root, folder.run(method, seed).root) for method, seed in runs]


def _prepare(recipe: Recipe, folder: RunFolder, *, resume: bool, method: str | None = None) -> Bench:
    """Set the bench up and, when nothing in the folder comes from something else, write what its runs share."""
    bench = set_up(recipe)
    if PartialState().is_main_process:
        with hold_shared(folder.root):
            open_folder(folder.root, recipe, resume=resume, method=method)  # another process may have begun meanwhile
            check_shared(folder.root, bench.shared, bench.plans)
            for name, seed in planned_runs(recipe):
                check_run(folder.run(name, seed).root, bench.identify(name, seed))
            write_shared(folder.root, recipe.to_yaml(), bench.shared, bench.plans, bench.matmul)
    return bench


def _clock(folder: RunFolder) -> Clock:
    """Return a clock that goes on where the folder's last session stopped."""
    if not folder.results.is_file():
        return Clock()
    last = folder.read_results()["provenance"]
    return Clock(started=last["started"], before=last["wall_s"])


def _complete_run(bench: Bench, folder: RunFolder, method: str, seed: int, *, resume: bool, progress: Progress) -> None:
    """Bring one run to its result.json, doing only what is not done yet."""
    paths, run = folder.run(method, seed), run_name(method, seed)
    if paths.result.is_file():
        result = read_json(paths.result)
    else:
        if method != bench.recipe.baseline:
            _trained(bench, folder, method, seed, resume=resume, progress=progress)
        result = evaluate_run(bench, method, seed, paths, progress=progress)
    progress.finished(run, _summary(result))
    if method == bench.recipe.baseline:
        _gate(bench.recipe, result, paths.evaluations)


def _gate(recipe: Recipe, result: dict[str, Any], records: Path) -> None:
    """Stop before any training if the base scores outside what is known of it, unless the recipe allows that.

    Likewise if a task's metric is one by which no methods can be compared.
    """
    scores = scores_of(result)
    check_comparable(records, scores, aggregations(recipe, scores))
    surprises = known_score_surprises(recipe, scores)
    if surprises and not recipe.evaluation.allow_unknown_base:
        raise HfpatchError(f"{' '.join(surprises)} evaluation.allow_unknown_base=true goes on all the same")


def _trained(bench: Bench, folder: RunFolder, method: str, seed: int, *, resume: bool, progress: Progress) -> None:
    """Bring one run to its training.json; its checkpoints are of use to an interrupted training only."""
    paths = folder.run(method, seed)
    if not paths.training.is_file():
        train_run(bench, method, seed, paths, resume=resume, progress=progress)
    if not PartialState().is_main_process:
        return
    if not bench.recipe.training.keep_finished:
        shutil.rmtree(paths.checkpoints, ignore_errors=True)
    if (step := diverged_step(read_json(paths.training))) is not None:
        warnings.warn(
            f"{run_name(method, seed)}: diverged at step {step}: it has no patch and no scores, and no comparison "
            "counts it; a lower learning rate may help, and training.on_bad_loss=stop names the blocks of the step",
            stacklevel=2,
        )


def _summary(result: dict[str, Any]) -> str:
    """Return each task's primary metric, in one line, or that the run diverged."""
    if (step := diverged_step(result["train"])) is not None:
        return f"diverged at step {step}"
    scores = result["evaluation"].items()
    return ", ".join(f"{task} {score['primary']} {score['metrics'][score['primary']]:.4g}" for task, score in scores)
