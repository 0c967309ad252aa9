"""`train`: the trainings of one method of a recipe, without what evaluations and reports need."""

from __future__ import annotations

from pathlib import Path

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.runs.folder import RunPaths, diverged_step
from hfpatch.runs.plan import plan_training
from hfpatch.runs.progress import Progress
from hfpatch.runs.session import check_start, open_runs
from hfpatch.runs.train_eval import ComparisonSession
from hfpatch.support.files import read_json


def train(
    recipe: Recipe, method: str, out: Path, *, resume: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Train one method of a recipe with each of its seeds; `compare` with ``resume`` continues from there.

    Where the recipe tunes, the method is tuned first, by its own trials alone. If `compare` later extends the rates for
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
    plan = plan_training(recipe, out, method)
    check_start(plan, resume=resume)
    session = ComparisonSession(recipe, plan, progress)
    with open_runs(session, resume=resume):
        if method in session.setup.left_out:
            raise HfpatchError(f"{method} is left out: {session.setup.left_out[method]}")
        for unit in plan.units:
            session.complete(unit)
    trained = [RunPaths(unit.run.folder) for unit in plan.units if unit.action == "train"]
    return [paths.patch for paths in trained if diverged_step(read_json(paths.training)) is None]
