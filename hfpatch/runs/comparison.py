"""`compare`: the recipe of a comparison or a study in, a run folder out; and `train`, the trainings of one method."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.results.folder import RESULTS
from hfpatch.runs.declared import declare
from hfpatch.runs.engines.driver import open_engine
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.folder import changes, is_complete, require_saved
from hfpatch.runs.plan import plan_runs
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import ResultsHead, Trained
from hfpatch.runs.session import check_start, open_runs
from hfpatch.runs.train_eval import TrainEvalSession
from hfpatch.support.files import read_json
from hfpatch.support.provenance import Clock
from hfpatch.training.processes import start_processes
from hfpatch.training.sharding import cuts_tensors


def compare(
    recipe: Recipe | StudyRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    variant: str | None = None,
    progress: Progress | None = None,
    engine: EngineSettings | None = None,
) -> dict[str, Any]:
    """Tune, train and evaluate every method of a recipe, or variant of a study, with every seed, compare and report.

    The base of a comparison is evaluated first, and compared with its known scores before anything is trained. In a
    study all runs with one seed see the same blocks in the same order and start from the same weights where they share
    any. Each run leaves its result when it is complete; with ``resume`` such runs are not repeated, also where the
    recipe has got more methods, variants or seeds since: the new runs are trained, and compared with all others. One
    that was interrupted continues from its newest checkpoint. A run that diverges is a result like others, without
    scores: the reports name its step, and the comparisons leave it out. Where seeds grow (``training.seeds.looks``), it
    ends when every primary pair is decided, or after the last look. On several processes every training and every
    evaluation is shared by all of them.

    Args:
        recipe: what to compare.
        out: the run folder.
        resume: continue the run in ``out``.
        variant: of a study, train this one's runs alone, and leave the report to a later call; several such calls may
            work in one folder at a time.
        progress: called at every step; None shows nothing.
        engine: where the runs take place; None is one after the other in this process.

    Returns:
        The content of ``out/results.json``.

    Raises:
        HfpatchError: if ``out`` cannot take this run, a variant cannot be built, or something that the recipe names
            cannot be loaded or used.
    """
    if isinstance(recipe, Recipe) and start_processes().num_processes > 1 and cuts_tensors():
        raise HfpatchError(
            "compare evaluates a whole model on each process, but FSDP and DeepSpeed shard it; launch with "
            "plain DDP, or launch hfpatch train for each method, then compare --resume"
        )
    return run_session(TrainEvalSession(plan_runs(recipe, Path(out), variant), progress), resume=resume, engine=engine)


def train(
    recipe: Recipe, method: str, out: str | Path, *, resume: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Train one method of a recipe with each of its seeds; `compare` with ``resume`` continues from there.

    Where seeds grow, it is trained with the seeds before the first look and the ones that `compare` asked for. Where
    the recipe tunes, the method is tuned first, by its own trials alone. If `compare` later extends the rates for
    another method and this one then has a better rate, it says which runs to delete.

    Args:
        recipe: the recipe that has the method.
        method: its name.
        out: the run folder.
        resume: continue the runs in ``out``.
        progress: called at every step; None shows nothing.

    Returns:
        The folder of each seed's patch; a seed that diverged has none.

    Raises:
        HfpatchError: as `compare`, and if there is no such method or nothing in it to train.
    """
    plan = plan_runs(recipe, Path(out), method)
    check_start(plan, resume=resume)
    session = TrainEvalSession(plan, progress)
    with open_runs(plan, session.set_up, resume=resume) as setup:  # no questions, as the tasks are not loaded
        if method in setup.left_out:
            raise HfpatchError(f"{method} is left out: {setup.left_out[method]}")
        for unit in plan.units:
            session.complete_alone(unit)
    trained = [unit.run.paths for unit in plan.units if unit.action == "train" and session.is_wanted(unit.run)]
    patches = [paths.patch for paths in trained if Trained.read(paths.training).diverged_step is None]
    for patch in patches:
        require_saved(patch)
    return patches


def run_session(session: TrainEvalSession, *, resume: bool, engine: EngineSettings | None) -> dict[str, Any]:
    """Complete the units of a session's plan and, unless it is of a part, report; return ``results.json``."""
    from hfpatch import reporting  # here, as training alone needs none

    plan, out, is_whole = session.plan, session.plan.out, session.plan.part is None
    check_start(plan, resume=resume)
    with ExitStack() as stack:  # which holds the locks until the report is written
        if not (is_complete(out) and not changes(out, plan.recipe)[0]):
            if (out / RESULTS).is_file():
                times = ResultsHead.read(out / RESULTS).provenance
                session.clock = Clock(started=times.started, before=times.wall_s)
            executor = stack.enter_context(open_engine(engine, session.progress))
            stack.enter_context(open_runs(plan, session.set_up, resume=resume, declare=partial(declare, plan)))
            try:
                executor.execute(session)
            except BaseException:
                if session.is_unwritten:
                    session.write_results()
                raise
            if executor.measures and is_whole:
                session.measure_costs()
            session.write_results(complete=is_whole)
        state = start_processes()
        if state.is_main_process and is_whole:
            reporting.write_report(out)
        results: dict[str, Any] = read_json(out / RESULTS)
        state.wait_for_everyone()
    return results
