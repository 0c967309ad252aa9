"""`pretrain`: a pretraining recipe in, a Hugging Face model folder out; and the inputs of a study of several."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hfpatch.data.load import Splits, load_splits
from hfpatch.data.plan import draw_plans
from hfpatch.errors import HfpatchError
from hfpatch.models import non_embedding_parameters, register_scratch
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe
from hfpatch.recipes.questions import Asked
from hfpatch.recipes.training import with_steps
from hfpatch.recipes.tuning import point_name
from hfpatch.results.parts import TrainResult
from hfpatch.runs.corpus import recipe_tokenizer
from hfpatch.runs.identity import identify_data, identify_training
from hfpatch.runs.plan import PlannedRun, plan_pretraining
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Identity, PretrainingResult
from hfpatch.runs.session import check_start, open_runs
from hfpatch.runs.setup import Inputs, Setup, draw_all_plans
from hfpatch.runs.tuning import Tuning
from hfpatch.support.files import check_data_dir, hash_values, read_json
from hfpatch.support.folders import cache_folder
from hfpatch.support.paths import takes_text
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.bases import require_causal
from hfpatch.training.architecture import build_model
from hfpatch.training.pretrain import check_settings
from hfpatch.training.pretrain import pretrain as train_from_scratch
from hfpatch.training.processes import start_processes
from hfpatch.training.run import check_blocks, check_context


def load_text(
    recipe: PretrainRecipe | StudyRecipe, progress: Progress, *, tuning: int = 0
) -> tuple[PreTrainedTokenizerBase, Splits]:
    """Return a recipe's tokenizer and its text in blocks, ``tuning`` groups of it for trials."""
    check_data_dir(recipe.data_dir)
    progress.preparing(f"reading and tokenising {recipe.data.named}")
    with start_processes().local_main_process_first():  # the others read its cache
        tokenizer = recipe_tokenizer(recipe)
        splits = load_splits(
            recipe.data,
            tokenizer,
            data_dir=recipe.data_dir,
            cache_dir=cache_folder("tokens"),
            tuning=tuning,
            evaluation=recipe.evaluation_data if isinstance(recipe, PretrainRecipe) else None,
            by_text=recipe.tokenizer.train_vocab_size is not None,
        )
    return tokenizer, splits


def try_model(recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerBase, splits: Splits) -> tuple[int, int]:
    """Build a recipe's model on the meta device, and return its parameters: all, and those outside of embeddings.

    Raises:
        HfpatchError: if it cannot be built, does not take the blocks, or cannot be trained with the settings.
    """
    with torch.device("meta"):
        model = build_model(recipe.architecture, tokenizer=tokenizer, seed=recipe.seed)
    check_context(model, splits.train, splits.held_out)
    check_settings(recipe.training, model)
    return model.num_parameters(), non_embedding_parameters(model)


def train_model(
    setup: Inputs, recipe: PretrainRecipe, run: PlannedRun, identity: Identity, progress: Progress
) -> tuple[PreTrainedModel, TrainResult]:
    """Train the model of a run's recipe, from its newest checkpoint where there is one; a trial's is not saved."""
    progress.started(run.name, recipe.training.steps)
    model = build_model(recipe.architecture, tokenizer=setup.tokenizer, seed=recipe.seed)
    require_causal(model, "architecture")
    training = setup.training(run, recipe.training, identity, progress)
    check_blocks(model, training.blocks, training.held_out)
    outcome = train_from_scratch(model, training, resume=True, tokenizer=setup.tokenizer, save=not run.point)
    return model, outcome


@dataclass(frozen=True, kw_only=True)
class StudySetup(Setup):
    """The inputs of a study of models from scratch.

    Attributes:
        sizes: the parameter counts of each variant: all, and those outside of embeddings and a head.
    """

    recipe: StudyRecipe
    sizes: Mapping[str, tuple[int, int]]

    @cached_property
    def questions(self) -> list[Asked]:
        """The primary question of the study."""
        return self.recipe.asked()

    def saved(self, run: PlannedRun) -> AbstractContextManager[PreTrainedModel]:
        """Yield the model that a run has saved; no code of its folder is run."""
        folder = run.paths.model
        register_scratch(folder)
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="float32", trust_remote_code=False)
        return nullcontext(model.to(PartialState().device))

    def single(self, run: PlannedRun) -> PretrainRecipe:
        """Return the recipe of one run: a trial's with its values, a final run's with the chosen ones."""
        values = run.point or self.tuning.chosen(run.variant)
        return self.recipe.single(run.variant, values, run.seed, trial=bool(run.point))

    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of one run."""
        recipe = self.single(run)
        architecture = hash_values(recipe.architecture)
        return identify_training(self.shared, recipe.training, self.plans[run.seed], architecture=architecture)


def set_up_study(recipe: StudyRecipe, tuning: Tuning, progress: Progress) -> StudySetup:
    """Load the text and try every variant on the meta device, so that a mistake shows before any training.

    Raises:
        HfpatchError: if the text cannot be loaded, or a variant cannot be built or trained.
    """
    trials = recipe.tuning
    tokenizer, splits = load_text(recipe, progress, tuning=trials.held_out if trials is not None else 0)
    recipe = recipe.model_copy(update={"training": with_steps(recipe.training, len(splits.train))})
    sizes: dict[str, tuple[int, int]] = {}
    for name in recipe.variants:
        tuned = recipe.tuning_of(name)
        for values in tuned.combinations(name, {}) if tuned is not None else [{}]:
            try:
                sizes[name] = try_model(recipe.single(name, values, recipe.training.all_seeds[0]), tokenizer, splits)
            except HfpatchError as error:
                raise HfpatchError(f"variants.{name}{' at ' * bool(values)}{point_name(values)}: {error}") from error
    return StudySetup(
        recipe=recipe,
        blocks=splits.train,
        held_out=splits.held_out,
        plans=draw_all_plans(recipe, splits),
        shared=identify_data(tokenizer, splits),
        tuning=replace(tuning, untrained=math.log(len(tokenizer))),
        tuning_text=splits.tuning,
        cautions=splits.cautions,
        tokenizer=tokenizer,
        sizes=sizes,
    )


@dataclass(frozen=True, kw_only=True)
class ModelSetup(Inputs):
    """The inputs of the training of one model, whose identity is all that is shared.

    Attributes:
        size: its parameter counts: all, and those outside of embeddings and a head.
    """

    recipe: PretrainRecipe
    size: tuple[int, int]


def set_up_model(recipe: PretrainRecipe, progress: Progress) -> ModelSetup:
    """Load the text and try the model on the meta device, so that a mistake shows before the training.

    Raises:
        HfpatchError: as `set_up_study`.
    """
    tokenizer, splits = load_text(recipe, progress)
    recipe = recipe.model_copy(update={"training": with_steps(recipe.training, len(splits.train))})
    plans, architecture = draw_plans(recipe.training, splits.train, [recipe.seed]), hash_values(recipe.architecture)
    shared, plan = identify_data(tokenizer, splits), plans[recipe.seed]
    return ModelSetup(
        recipe=recipe,
        tokenizer=tokenizer,
        blocks=splits.train,
        held_out=splits.held_out,
        plans=plans,
        shared=identify_training(shared, recipe.training, plan, architecture=architecture),
        size=try_model(recipe, tokenizer, splits),
    )


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
    plan, progress = plan_pretraining(recipe, out), progress or Progress()
    (unit,) = plan.units
    run, load = unit.run, partial(set_up_model, recipe, progress)
    check_start(plan, resume=resume)
    state = start_processes()
    if not unit.is_complete():
        with open_runs(plan, load, resume=resume) as setup:
            clock = Clock()
            _, outcome = train_model(setup, setup.recipe, run, setup.shared, progress)
            result = PretrainingResult(
                identity=setup.shared,
                provenance=provenance(clock),
                data=setup.blocks.to_json(),
                plan={"sha256": setup.plans[run.seed].sha256},
                parameters={"total": setup.size[0], "non_embedding": setup.size[1]},
                train=outcome,
            )
            if state.is_main_process:
                result.write(run.paths.result)
            state.wait_for_everyone()
            progress.finished(run.name, result.summary)
    if state.is_main_process and not recipe.training.keep_finished:  # including those of a killed process
        shutil.rmtree(run.paths.checkpoints, ignore_errors=True)
    written: dict[str, Any] = read_json(run.paths.result)
    return written
