"""`compare`: a recipe in, a run folder out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.reporting import write_report
from hfpatch.runs.folder import RunFolder
from hfpatch.runs.plan import plan_comparison
from hfpatch.runs.progress import Progress
from hfpatch.runs.results import collect
from hfpatch.runs.session import check_start, open_runs, resumed_clock
from hfpatch.runs.setup import set_up
from hfpatch.runs.train_eval import complete
from hfpatch.runs.tuning import Tuning
from hfpatch.support.files import write_json
from hfpatch.training.processes import start_processes
from hfpatch.training.sharding import cuts_tensors


def compare(recipe: Recipe, out: Path, *, resume: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Tune, train and evaluate every method of a recipe with every seed, compare them and report.

    The base is evaluated first, and compared with its known scores before anything is trained. Each run leaves its
    result when it is complete; with ``resume`` such runs are not repeated. A run that diverges is a result like others,
    without scores: the reports name its step, and the comparisons leave it out. On several processes every training and
    every evaluation is shared by all of them.

    Args:
        recipe: what to compare.
        out: the run folder.
        resume: continue the run in ``out``.
        progress: called at every step; None shows nothing.

    Returns:
        The content of ``out/results.json``.

    Raises:
        HfpatchError: if ``out`` cannot take this run, or something that the recipe names cannot be loaded or used.
    """
    state, plan, folder = start_processes(), plan_comparison(recipe, out), RunFolder(out)
    if state.num_processes > 1 and cuts_tensors():
        raise HfpatchError(
            "compare evaluates a whole model on each process, which FSDP and DeepSpeed cut in pieces; launch with "
            "plain DDP, or launch hfpatch train for each method, then compare --resume"
        )
    check_start(plan, resume=resume)
    if folder.is_complete():
        if state.is_main_process:
            write_report(out)
        state.wait_for_everyone()
        return folder.read_results()
    clock = resumed_clock(out)
    with open_runs(plan, partial(set_up, recipe, Tuning(plan.tuning, plan.part)), resume=resume) as setup:
        for unit in plan.units:
            complete(unit, setup, progress or Progress())
            if unit.action in ("tune", "evaluate") and state.is_main_process:
                write_json(folder.results, collect(setup, folder, clock, complete=False).to_json())
        if state.is_main_process:
            write_json(folder.results, collect(setup, folder, clock, complete=True).to_json())
            write_report(out)
        state.wait_for_everyone()
    return folder.read_results()
