"""`compare --dry-run` and `pretrain --dry-run`: the units of a plan as a graph, and how long they take on N devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs.engines.driver import open_engine
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.folder import check_folder
from hfpatch.runs.measuring import SECONDS, measure
from hfpatch.runs.plan import Unit, plan_runs
from hfpatch.runs.progress import Progress
from hfpatch.support.paths import takes_text


@dataclass(frozen=True)
class Step:
    """One unit of a preview.

    Attributes:
        unit: the unit.
        needs: the numbers of the units that must be complete before, counted from 1.
        seconds: how long it takes; 0 where it is complete, a check or a look.
        optional: whether it may turn out not to be needed.
    """

    unit: Unit
    needs: tuple[int, ...]
    seconds: float
    optional: bool


@dataclass(frozen=True)
class Preview:
    """The units that a command would complete.

    Attributes:
        steps: the units, each after the units that it needs.
        devices: how many runs the engine works on at a time.
        source: where the times come from; empty where nothing is left to do.
    """

    steps: tuple[Step, ...]
    devices: int
    source: str

    def duration(self, devices: int) -> float:
        """Return about how many seconds the units take on ``devices`` devices, without optional units.

        It is the longest chain of units that need each other, or all units shared by the devices, whichever takes
        longer.
        """
        seconds, ends = [0.0 if step.optional else step.seconds for step in self.steps], [0.0]
        for step, taken in zip(self.steps, seconds, strict=True):
            ends.append(taken + max((ends[needed] for needed in step.needs), default=0.0))
        return max(*ends, sum(seconds) / devices)


@takes_text
def preview(
    recipe: Recipe | StudyRecipe,
    out: Path,
    *,
    engine: EngineSettings | None = None,
    variant: str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Preview:
    """Plan a comparison or a study as `compare` does, and write nothing but caches.

    The times are measured: of a part of a step and of the tasks, of each kind of method or of each variant.

    Args:
        recipe: what would be run.
        out: the run folder.
        engine: where the runs would take place.
        variant: of a study, the one whose runs alone would take place.
        resume: whether ``out`` may hold runs of this recipe.
        progress: called at each measurement.

    Raises:
        HfpatchError: as the command itself does before it trains anything.
    """
    check_folder(out, recipe, resume=resume, part=variant)
    with open_engine(engine, progress, works=False) as executor:
        devices = executor.at_once
    plan = plan_runs(recipe, out, variant)
    optional = {
        run.folder for trials in plan.tuning if (trials.edge, trials.enough) != (None, None) for run in trials.runs
    }
    if recipe.training.looks:
        first = recipe.training.first_seeds
        optional |= {run.folder for run in plan.runs if not run.point and run.seed not in first}

    left = {id(unit) for unit in plan.units if unit.marker is not None and not unit.is_complete()}
    measured = measure(recipe, SECONDS, progress or Progress(), spread=False) if left else None
    numbers = {id(unit): number for number, unit in enumerate(plan.units, start=1)}
    steps = [
        Step(
            unit,
            tuple(numbers[id(needed)] for needed in unit.needs),
            measured.work_of(unit).seconds if measured is not None and id(unit) in left else 0.0,
            unit.run.folder in optional,
        )
        for unit in plan.units
    ]
    return Preview(tuple(steps), devices, "" if measured is None else measured.words.rstrip("."))
