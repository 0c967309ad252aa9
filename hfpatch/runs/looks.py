"""Seeds that grow until the primary pairs are decided: which runs the looks taken so far ask for.

The units of a plan have every seed that may be needed. After each look only the methods of undecided primary pairs,
and their references, get the seeds up to the next one. Every session takes the looks again, from the runs' records.
"""

from __future__ import annotations

from pathlib import Path

from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.results.verdicts import LookTaken
from hfpatch.runs.plan import PlannedRun
from hfpatch.support.files import read_json, write_json

FILE = "looks.json"


def read_looks(out: Path) -> list[LookTaken]:
    """Return the looks that were taken in a run folder, in their order."""
    file = out / FILE
    return [LookTaken.model_validate(each) for each in read_json(file)["looks"]] if file.is_file() else []


def write_looks(out: Path, taken: list[LookTaken]) -> None:
    """Write the looks that were taken so far."""
    write_json(out / FILE, {"looks": [each.to_json() for each in taken]})


def is_wanted(recipe: Recipe | StudyRecipe, out: Path, run: PlannedRun) -> bool:
    """Return whether a run is needed as far as is known: all are but those of seeds that no look asks for."""
    training = recipe.training
    if run.point or not training.looks or run.seed in training.first_seeds:
        return True
    before = max(seeds for seeds in training.looks if seeds <= run.seed)
    return any(each.seeds == before and run.variant in each.growing for each in read_looks(out))
