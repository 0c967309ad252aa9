"""`pretrain`: a pretraining recipe in, a Hugging Face model folder out; and the run that a study repeats."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.load import load_splits
from hfpatch.data.plan import BatchPlan, draw_evaluation, draw_plans
from hfpatch.errors import HfpatchError
from hfpatch.models import non_embedding_parameters
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe
from hfpatch.recipes.training import with_steps
from hfpatch.runs.corpus import recipe_tokenizer
from hfpatch.runs.folder import summarise
from hfpatch.runs.identity import Identity, identify_data, identify_training, write_shared
from hfpatch.runs.plan import PlannedRun, Unit, plan_pretraining, planned_runs
from hfpatch.runs.progress import Progress
from hfpatch.runs.session import Session, check_start, open_runs, resumed_clock
from hfpatch.support.files import check_data_dir, hash_values, read_json, write_json
from hfpatch.support.folders import cache_folder
from hfpatch.support.paths import takes_text
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.bases import require_causal
from hfpatch.training.architecture import build_model
from hfpatch.training.pretrain import check_settings
from hfpatch.training.pretrain import pretrain as run_pretraining
from hfpatch.training.processes import start_processes
from hfpatch.training.run import check_blocks, check_context


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, the blocks to train on, those whose loss is measured, if any, and the hashes of all three."""

    tokenizer: PreTrainedTokenizerBase
    train: TokenBlocks
    evaluation: TokenBlocks | None
    identity: Identity


@dataclass(frozen=True)
class PretrainingSetup:
    """The inputs that all runs of a study share, or those of a single run, checked before any of them.

    Attributes:
        recipe: the recipe.
        out: the folder.
        corpus: the tokenizer and the text.
        plans: the batch plan of each seed.
        parameters: the parameter counts of each variant, ``total`` and ``non_embedding``.
    """

    recipe: PretrainRecipe | StudyRecipe
    out: Path
    corpus: Corpus
    plans: Mapping[int, BatchPlan]
    parameters: Mapping[str, Mapping[str, int]]
    matmul: None = None  # each training chooses its library and keeps it in its checkpoints

    @property
    def shared(self) -> Identity:
        """The identity that all runs share; of a single model that of its run."""
        if isinstance(self.recipe, PretrainRecipe):
            return self.identify(*planned_runs(self.recipe, self.out))
        return self.corpus.identity

    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of one run."""
        recipe = single_recipe(self.recipe, run)
        training = identify_training(recipe.training, self.plans[run.seed])
        return {**self.corpus.identity, "architecture": hash_values(recipe.architecture), **training}


class PretrainingSession(Session):
    """The training of one model, or those of a study."""

    setup: PretrainingSetup

    def set_up(self) -> None:
        """Load the text and try every model on the meta device, so that a mistake shows before any training."""
        assert not isinstance(self.plan.recipe, Recipe)
        out, recipe = self.plan.out, self.plan.recipe
        check_data_dir(recipe.data_dir)
        self.progress.preparing(f"reading and tokenising {recipe.data.named}")
        with start_processes().local_main_process_first():  # the others read its cache
            tokenizer = recipe_tokenizer(recipe)
            splits = load_splits(
                recipe.data,
                tokenizer,
                data_dir=recipe.data_dir,
                cache_dir=cache_folder("tokens"),
                evaluation=recipe.evaluation_data,
                by_text=recipe.tokenizer.train_vocab_size is not None,
            )
        evaluation = splits.held_out
        if evaluation is not None and recipe.evaluation_blocks is not None:
            evaluation = draw_evaluation(evaluation, recipe.evaluation_blocks)
        corpus = Corpus(tokenizer, splits.train, evaluation, identify_data(tokenizer, splits.train, evaluation))

        # Every model on the meta device
        recipe = recipe.model_copy(update={"training": with_steps(recipe.training, len(corpus.train))})
        runs = planned_runs(recipe, out)
        plans = draw_plans(recipe.training, corpus.train, dict.fromkeys(run.seed for run in runs))
        parameters: dict[str, dict[str, int]] = {}
        for run in runs:
            if run.seed != runs[0].seed:
                continue
            single = single_recipe(recipe, run)
            try:
                with torch.device("meta"):
                    model = build_model(single.architecture, tokenizer=corpus.tokenizer, seed=single.seed)
                check_context(model, corpus.train, corpus.evaluation)
                check_settings(single.training, model)
            except HfpatchError as error:
                where = f"variants.{run.variant}: " if isinstance(recipe, StudyRecipe) else ""
                raise HfpatchError(f"{where}{error}") from error
            parameters[run.variant] = {
                "total": model.num_parameters(),
                "non_embedding": non_embedding_parameters(model),
            }
        self.clock, self.setup = resumed_clock(out), PretrainingSetup(recipe, out, corpus, plans, parameters)

    def complete(self, unit: Unit) -> None:
        """Complete a unit."""
        try:
            if not unit.is_complete():
                self.train(unit.run)
        except HfpatchError as error:
            raise HfpatchError(f"{unit.run.name}: {error}") from error

    def train(self, run: PlannedRun) -> None:
        """Train one model, from its newest checkpoint where it has one, and write its folder."""
        clock, state, setup, corpus = Clock(), start_processes(), self.setup, self.setup.corpus
        recipe, plan, identity = single_recipe(setup.recipe, run), setup.plans[run.seed], setup.identify(run)
        model = build_model(recipe.architecture, tokenizer=corpus.tokenizer, seed=recipe.seed)
        require_causal(model, "architecture")
        check_blocks(model, corpus.train, corpus.evaluation)
        if state.is_main_process:
            write_shared(run.folder, recipe.to_yaml(), identity, {})
        self.progress.started(run.name, recipe.training.steps)
        outcome = run_pretraining(
            model,
            settings=recipe.training,
            blocks=corpus.train,
            plan=plan,
            evaluation_blocks=corpus.evaluation,
            tokenizer=corpus.tokenizer,
            seed=recipe.seed,
            run_dir=run.folder,
            resume=True,
            on_step=partial(self.progress.stepped, run.name),
            origin=identity,
        )
        result = {
            "provenance": provenance(clock),
            "identity": identity,
            "data": corpus.train.to_json(),
            "plan": {"sha256": plan.sha256},
            "parameters": setup.parameters[run.variant],
            "train": outcome.to_json(),
        }
        if state.is_main_process:
            write_json(run.result, result)
            if not recipe.training.keep_finished:  # they are of use to an interrupted run only
                shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        state.wait_for_everyone()
        self.progress.finished(run.name, summarise(result))


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
            session.train(unit.run)
    result: dict[str, Any] = read_json(unit.run.result)
    return result


def single_recipe(recipe: PretrainRecipe | StudyRecipe, run: PlannedRun) -> PretrainRecipe:
    """Return the recipe of one run."""
    return recipe if isinstance(recipe, PretrainRecipe) else recipe.single(run.variant, run.point, run.seed)
