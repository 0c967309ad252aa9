"""`pretrain_study`: variants of a model, tuned, trained from scratch and measured on held-out text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import AutoModelForCausalLM, PreTrainedModel

from hfpatch.models import register_scratch
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.results.records import write_values
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.identity import check_seeds
from hfpatch.runs.plan import PlannedRun, plan_study
from hfpatch.runs.pretraining import StudySetup, set_up_study, train_model
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import RunResult
from hfpatch.runs.retention import measure_held_out
from hfpatch.runs.train_eval import TrainEvalSession
from hfpatch.runs.tuning import Tuning
from hfpatch.support.paths import takes_text
from hfpatch.training.processes import start_ranks


class StudySession(TrainEvalSession):
    """The units of a study."""

    setup: StudySetup

    def load(self) -> StudySetup:
        """Load the text, and try each variant."""
        recipe = self.plan.recipe
        assert isinstance(recipe, StudyRecipe)
        return set_up_study(recipe, Tuning(self.plan.tuning, self.plan.part), self.progress)

    def train(self, run: PlannedRun) -> None:
        """Train a variant from scratch, from its newest checkpoint where it has one."""
        identity = self.setup.identify(run)
        if not run.point:
            check_seeds(run.folder.parent, identity)
        self.finish_training(run, identity, *train_model(self.setup, self.setup.single(run), run, self.progress))

    def score(self, run: PlannedRun) -> RunResult:
        """Return the loss of a saved model on held-out text, and write that of each document."""
        from hfpatch.evaluation.cache import computed_with

        paths, ranks = RunPaths(run.folder), start_ranks()
        self.progress.evaluating(run.name, HELD_OUT)
        model = load_model(paths.model).to(PartialState().device)
        records = paths.evaluations if ranks.is_first else None
        scores = {HELD_OUT: measure_held_out(model, self.setup, records, ranks)}
        if records is not None:
            write_values(records, scores)
        return RunResult(evaluation=scores, computed_with=computed_with(model))


def load_model(folder: Path) -> PreTrainedModel:
    """Load a model that was trained from scratch; no code of the folder is run."""
    register_scratch(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(folder), dtype="float32", trust_remote_code=False)
    return model.eval()


@takes_text
def pretrain_study(
    recipe: StudyRecipe,
    out: Path,
    *,
    resume: bool = False,
    variant: str | None = None,
    progress: Progress | None = None,
    engine: EngineSettings | None = None,
) -> dict[str, Any]:
    """Tune every variant of a study, train it with every seed on the same batches, compare them and report.

    All runs with one seed see the same blocks in the same order and start from the same weights where they share
    any. A run that diverges is a result like others. Each run leaves its result.json when it is complete; with
    ``resume`` such runs are not repeated, and one that was interrupted continues from its newest checkpoint. Where
    seeds grow (``training.seeds.looks``), it ends when every primary pair is decided, or after the last look. On
    several processes every run is shared by all of them.

    Args:
        recipe: what to compare.
        out: the folder of the study.
        resume: continue the study in ``out``.
        variant: train this one's runs alone, and leave the report to a later call; several such calls may work in
            one folder at a time.
        progress: called at every step; None shows nothing.
        engine: where the runs take place; None is one after the other in this process.

    Returns:
        The content of ``out/results.json``.

    Raises:
        HfpatchError: if ``out`` cannot take this study, a variant cannot be built, or something that the recipe names
            cannot be loaded or used.
    """
    session = StudySession(plan_study(recipe, out, variant), progress)
    return session.run(resume=resume, engine=engine)
