"""The units of a study: tune a variant of a model, train it from scratch, measure it on held-out text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from accelerate import PartialState
from transformers import AutoModelForCausalLM, PreTrainedModel

from hfpatch.models import register_scratch
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.results.parts import HELD_OUT
from hfpatch.results.records import write_values
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.identity import check_seeds
from hfpatch.runs.plan import PlannedRun
from hfpatch.runs.records import RunResult
from hfpatch.runs.retention import by_document
from hfpatch.runs.scratch import StudySetup, set_up_study, train_model
from hfpatch.runs.train_eval import TrainEvalSession
from hfpatch.runs.tuning import Tuning
from hfpatch.training.processes import start_ranks
from hfpatch.training.validation import document_losses


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
        setup, recipe, identity = self.setup, self.setup.single(run), self.setup.identify(run)
        if not run.point:
            check_seeds(run.folder.parent, identity)
        self.progress.started(run.name, recipe.training.steps)
        model, outcome = train_model(
            recipe,
            tokenizer=setup.tokenizer,
            blocks=setup.blocks,
            held_out=None if run.point else setup.held_out,
            plan=setup.plans[run.seed],
            folder=run.folder,
            origin=identity,
            on_step=partial(self.progress.stepped, run.name),
            save=not run.point,
        )
        self.finish_training(run, model, outcome)

    def score(self, run: PlannedRun) -> RunResult:
        """Return the loss of a saved model on held-out text, and write that of each document."""
        from hfpatch.evaluation.cache import computed_with
        from hfpatch.evaluation.retention import held_out_result

        setup, paths, ranks = self.setup, RunPaths(run.folder), start_ranks()
        assert setup.held_out is not None
        self.progress.evaluating(run.name, HELD_OUT)
        model = load_model(paths.model).to(PartialState().device)
        losses = by_document(document_losses, model, setup, setup.held_out, ranks)
        records = paths.evaluations if ranks.is_first else None
        scores = {HELD_OUT: held_out_result(losses, setup.held_out_documents, records)}
        if records is not None:
            write_values(records, scores)
        return RunResult(evaluation=scores, computed_with=computed_with(model))


def load_model(folder: Path) -> PreTrainedModel:
    """Load a model that was trained from scratch; no code of the folder is run."""
    register_scratch(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(folder), dtype="float32", trust_remote_code=False)
    return model.eval()
