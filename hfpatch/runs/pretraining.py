"""`pretrain`: a pretraining recipe in, a Hugging Face model folder out; and `pretrain_study`, a study of several."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hfpatch.data.plan import draw_plans
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe
from hfpatch.recipes.training import with_steps
from hfpatch.runs.engines import make_engine
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.folder import changes, is_complete
from hfpatch.runs.identity import identify_data
from hfpatch.runs.plan import PlannedRun, Unit, plan_pretraining, plan_study
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Identity, PretrainingResult
from hfpatch.runs.scratch import identify_model, load_text, train_model, try_model
from hfpatch.runs.session import Session, check_start, open_runs, resumed_clock
from hfpatch.runs.setup import Inputs
from hfpatch.runs.study import StudySession
from hfpatch.support.files import read_json
from hfpatch.support.paths import takes_text
from hfpatch.support.provenance import Clock, provenance
from hfpatch.training.processes import start_processes


@dataclass(frozen=True, kw_only=True)
class PretrainingSetup(Inputs):
    """The inputs of a single pretraining, whose identity is all that it shares.

    Attributes:
        size: the parameter counts: all, and those outside of embeddings and a head.
    """

    recipe: PretrainRecipe
    size: tuple[int, int]

    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of the run."""
        return self.shared


class PretrainingSession(Session):
    """The training of one model."""

    setup: PretrainingSetup

    def load(self) -> PretrainingSetup:
        """Load the text and try the model on the meta device, so that a mistake shows before the training."""
        recipe = self.plan.recipe
        assert isinstance(recipe, PretrainRecipe)
        tokenizer, splits = load_text(recipe, self.progress)
        recipe = recipe.model_copy(update={"training": with_steps(recipe.training, len(splits.train))})
        plans, size = draw_plans(recipe.training, splits.train, [recipe.seed]), try_model(recipe, tokenizer, splits)
        return PretrainingSetup(
            recipe=recipe,
            tokenizer=tokenizer,
            blocks=splits.train,
            held_out=splits.held_out,
            plans=plans,
            shared=identify_model(identify_data(tokenizer, splits), recipe, plans[recipe.seed]),
            size=size,
        )

    def complete(self, unit: Unit) -> None:
        """Train the model, from its newest checkpoint where it has one, and write its folder."""
        run, clock, state, setup, recipe = unit.run, Clock(), start_processes(), self.setup, self.setup.recipe
        self.progress.started(run.name, recipe.training.steps)
        _, outcome = train_model(
            recipe,
            tokenizer=setup.tokenizer,
            blocks=setup.blocks,
            held_out=setup.held_out,
            plan=setup.plans[run.seed],
            folder=run.folder,
            origin=setup.shared,
            on_step=partial(self.progress.stepped, run.name),
        )
        result = PretrainingResult(
            identity=setup.shared,
            provenance=provenance(clock),
            data=setup.blocks.to_json(),
            plan={"sha256": setup.plans[run.seed].sha256},
            parameters={"total": setup.size[0], "non_embedding": setup.size[1]},
            train=outcome,
        )
        if state.is_main_process:
            result.write(run.result)
            if not recipe.training.keep_finished:  # they are of use to an interrupted run only
                shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        state.wait_for_everyone()
        self.progress.finished(run.name, result.summary)


@takes_text
def pretrain(
    recipe: PretrainRecipe, out: Path, *, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Train a model from scratch as the recipe says and write it with its tokenizer to ``out/model``.

    Beside it are recipe.yaml, metrics.jsonl, diagnostics.jsonl where asked for and, written last, result.json. A run
    that diverges ends there; it has no ``out/model``, and its result has the step.

    Args:
        recipe: what to train on what.
        out: the run folder.
        resume: continue the run in ``out``.
        progress: called at every step; None shows nothing.

    Returns:
        The content of ``out/result.json``.

    Raises:
        HfpatchError: if ``out`` cannot take this run, or something that the recipe names cannot be loaded or used.
    """
    plan = plan_pretraining(recipe, out)
    (unit,) = plan.units
    check_start(plan, resume=resume)
    if not unit.is_complete():
        session = PretrainingSession(plan, progress)
        with open_runs(session, resume=resume):
            session.complete(unit)
    result: dict[str, Any] = read_json(unit.run.result)
    return result


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
    from hfpatch import reporting

    plan = plan_study(recipe, out, variant)
    check_start(plan, resume=resume)
    if not (is_complete(out) and not changes(out, recipe)[0]):
        session = StudySession(plan, progress, resumed_clock(out))
        with closing(make_engine(engine or EngineSettings())) as executor:
            executor.connect(session.progress)
            with open_runs(session, resume=resume):
                with session.throttle:
                    executor.execute(session)
                session.write_results(complete=variant is None)
    state = start_processes()  # again: an engine that leaves the devices to its workers resets it
    if state.is_main_process and variant is None:
        reporting.write_report(out)
    state.wait_for_everyone()
    results: dict[str, Any] = read_json(out / "results.json")
    return results
