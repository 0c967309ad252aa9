"""What every run of a study shares, and which runs there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hfpatch.data.plan import BatchPlan
from hfpatch.recipes.pretraining import Point, StudyRecipe, point_name
from hfpatch.runs.corpus import Corpus
from hfpatch.support.files import read_json
from hfpatch.support.provenance import Clock


@dataclass(frozen=True)
class StudyBench:
    """A study's recipe and folder, its text, one batch plan a seed and each variant's parameter counts."""

    recipe: StudyRecipe
    out: Path
    corpus: Corpus
    plans: Mapping[int, BatchPlan]
    parameters: Mapping[str, Mapping[str, int]]
    clock: Clock


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study.

    Attributes:
        variant: the variant's name.
        point: the point of its sweep.
        seed: the seed.
        folder: the run's own folder.
    """

    variant: str
    point: Point
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """How the run is called where people read it."""
        return " · ".join(part for part in (self.variant, point_name(self.point), f"seed {self.seed}") if part)

    @property
    def result(self) -> Path:
        """The run's outcome; written last, so that it marks the run as complete."""
        return self.folder / "result.json"


def planned_runs(recipe: StudyRecipe, out: Path) -> Iterator[PlannedRun]:
    """Yield every run, seed by seed, so that an unfinished study has paired runs."""
    for seed in recipe.seeds:
        for variant in recipe.variants:
            for point in recipe.points(variant):
                yield PlannedRun(variant, point, seed, out / "runs" / variant / point_name(point) / f"seed-{seed}")


def study_clock(out: Path) -> Clock:
    """Return a clock that goes on where the folder's last session stopped."""
    if not (out / "results.json").is_file():
        return Clock()
    last = read_json(out / "results.json")["provenance"]
    return Clock(started=last["started"], before=last["wall_s"])
