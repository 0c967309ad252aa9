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
from hfpatch.runs.records import Looks

FILE = "looks.json"


def read_looks(out: Path) -> list[LookTaken]:
    """Return the looks that were taken in a run folder, in their order."""
    return Looks.read(out / FILE).looks if (out / FILE).is_file() else []


def is_wanted(recipe: Recipe | StudyRecipe, out: Path, run: PlannedRun) -> bool:
    """Return whether a run is needed as far as is known: all are but those of seeds that no look asks for."""
    training = recipe.training
    if run.point or not training.looks or run.seed in training.first_seeds:
        return True
    before = max(seeds for seeds in training.looks if seeds <= run.seed)
    return any(look.seeds == before and run.variant in look.growing for look in read_looks(out))
