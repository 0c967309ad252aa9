"""`compare`: a recipe in, a run folder out."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.reporting import write_report
from hfpatch.runs.engines.engine import Session
from hfpatch.runs.engines.settings import EngineSettings, make_engine
from hfpatch.runs.folder import RunFolder
from hfpatch.runs.growth import changes
from hfpatch.runs.pacing import Paced
from hfpatch.runs.plan import Plan, Unit, plan_comparison
from hfpatch.runs.progress import Progress
from hfpatch.runs.results import collect
from hfpatch.runs.session import check_start, open_runs, resumed_clock
from hfpatch.runs.setup import ComparisonSetup, set_up
from hfpatch.runs.train_eval import complete, is_due
from hfpatch.runs.tuning import Tuning
from hfpatch.support.files import write_json
from hfpatch.support.provenance import Clock
from hfpatch.training.processes import start_processes


def compare(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    engine: EngineSettings | None = None,
) -> dict[str, Any]:
    """Tune, train and evaluate every method of a recipe with every seed, compare them and report.

    The base is evaluated first, and compared with its known scores before anything is trained. Each run leaves its
    result when it is complete; with ``resume`` such runs are not repeated, also where the recipe has got more methods
    or seeds since: what is new is trained, and compared with all the rest. A run that diverges is a result like others,
    without scores: the reports name its step, and the comparisons leave it out.

    Args:
        recipe: what to compare.
        out: the run folder.
        resume: continue the run in ``out``.
        progress: called at every step; None shows nothing.
        engine: where the runs take place; None is one after the other in this process.

    Returns:
        The content of ``out/results.json``.

    Raises:
        HfpatchError: if ``out`` cannot take this run, or something that the recipe names cannot be loaded or used.
    """
    if start_processes().num_processes > 1:
        raise HfpatchError("compare runs in one process; launch hfpatch train for each method, then compare --resume")
    plan, folder = plan_comparison(recipe, out), RunFolder(out)
    check_start(plan, resume=resume)
    if folder.is_complete() and not changes(out, recipe)[0]:
        write_report(out)
        return folder.read_results()
    clock, executor = resumed_clock(out), make_engine(engine or EngineSettings())
    with closing(executor):
        executor.connect()
        tuning, holder = Tuning(plan.tuning, plan.part), executor.holder
        with open_runs(plan, partial(set_up, recipe, tuning), resume=resume, holder=holder) as setup:
            with Paced(lambda: _write(setup, folder, clock, complete=False)) as paced:
                executor.execute(_session(plan, setup, paced, progress or Progress()))
            results = _write(setup, folder, clock, complete=True)
            write_report(out)
    return results


def _write(setup: ComparisonSetup, folder: RunFolder, clock: Clock, *, complete: bool) -> dict[str, Any]:
    """Write results.json, of all runs that are complete, and return its content."""
    results = collect(setup, folder, clock, complete=complete).to_json()
    write_json(folder.results, results)
    return results


def _session(plan: Plan, setup: ComparisonSetup, paced: Paced, progress: Progress) -> Session:
    """Return what an engine executes: the units of a comparison, its results written as they come."""

    def record(unit: Unit) -> None:
        if unit.action in ("tune", "evaluate"):
            paced()

    return Session(
        plan=plan,
        complete=lambda unit: complete(unit, setup, progress),
        is_due=lambda unit: is_due(unit, setup),
        record=record,
        steps=lambda unit: setup.recipe_of(unit.run).training.steps,
        progress=progress,
    )
