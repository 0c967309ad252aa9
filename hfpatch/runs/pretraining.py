"""The inputs of a study of models from scratch, and the training of one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpatch.data.load import Splits, load_splits
from hfpatch.errors import HfpatchError
from hfpatch.models import load_whole, non_embedding_parameters
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe
from hfpatch.recipes.questions import Asked
from hfpatch.recipes.training import with_steps
from hfpatch.recipes.tuning import point_name
from hfpatch.results.parts import TrainResult
from hfpatch.runs.corpus import recipe_tokenizer
from hfpatch.runs.folder import REMEDY, require_saved
from hfpatch.runs.identity import identify_data, identify_training
from hfpatch.runs.plan import PlannedRun
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Identity
from hfpatch.runs.setup import Setup, draw_all_plans
from hfpatch.runs.tuning import Tuning
from hfpatch.support.files import check_data_dir, hash_values
from hfpatch.support.folders import cache_folder
from hfpatch.surgery.bases import require_causal
from hfpatch.training.architecture import build_model
from hfpatch.training.pretrain import check_settings
from hfpatch.training.pretrain import pretrain as train_from_scratch
from hfpatch.training.processes import start_processes
from hfpatch.training.run import check_blocks, check_context


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
        """Yield the model that a run has saved; no code of its folder is run.

        Raises:
            HfpatchError: if it is missing or damaged.
        """
        folder = run.paths.model
        require_saved(folder)
        try:
            model = load_whole(folder)
        except HfpatchError as error:
            raise HfpatchError(f"{error}; {REMEDY}") from error
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
    check_data_dir(recipe.data_dir)
    progress.preparing(f"reading and tokenising {recipe.data.named}")
    with start_processes().local_main_process_first():  # the others read its cache
        tokenizer = recipe_tokenizer(recipe)
        splits = load_splits(
            recipe.data,
            tokenizer,
            data_dir=recipe.data_dir,
            cache_dir=cache_folder("tokens"),
            tuning=recipe.tuning.held_out if recipe.tuning is not None else 0,
            evaluation=recipe.evaluation_data,
            by_text=recipe.tokenizer.train_vocab_size is not None,
        )
    recipe = recipe.model_copy(update={"training": with_steps(recipe.training, len(splits.train))})
    sizes: dict[str, tuple[int, int]] = {}
    for name in recipe.variants:
        tuned = recipe.tuning_of(name)
        for values in tuned.combinations(name, {}) if tuned is not None else [{}]:
            try:
                sizes[name] = _try_model(recipe.single(name, values, recipe.training.all_seeds[0]), tokenizer, splits)
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


def _try_model(recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerBase, splits: Splits) -> tuple[int, int]:
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
    setup: StudySetup, recipe: PretrainRecipe, run: PlannedRun, identity: Identity, progress: Progress
) -> tuple[PreTrainedModel, TrainResult]:
    """Train the model of a run's recipe, from its newest checkpoint where there is one; a trial's is not saved."""
    progress.started(run.name, recipe.training.steps)
    model = build_model(recipe.architecture, tokenizer=setup.tokenizer, seed=recipe.seed)
    require_causal(model, "architecture")
    training = setup.training(run, recipe.training, identity, progress)
    check_blocks(model, training.blocks, training.held_out)
    outcome = train_from_scratch(model, training, tokenizer=setup.tokenizer, save=not run.point)
    return model, outcome
