"""The inputs of a study of models from scratch, and the parts that its runs share with a single pretraining."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.load import Splits, load_splits
from hfpatch.data.plan import BatchPlan, draw_plans
from hfpatch.errors import HfpatchError
from hfpatch.models import non_embedding_parameters
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe
from hfpatch.recipes.questions import Asked
from hfpatch.recipes.training import with_steps
from hfpatch.recipes.tuning import point_name, trial_changes
from hfpatch.results.parts import TrainResult
from hfpatch.runs.corpus import recipe_tokenizer
from hfpatch.runs.identity import identify_data, identify_training
from hfpatch.runs.plan import PlannedRun
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Identity
from hfpatch.runs.setup import Setup
from hfpatch.runs.tuning import Tuning
from hfpatch.support.files import check_data_dir, hash_values
from hfpatch.support.folders import cache_folder
from hfpatch.surgery.bases import require_causal
from hfpatch.training.architecture import build_model
from hfpatch.training.pretrain import check_settings, pretrain
from hfpatch.training.processes import start_processes
from hfpatch.training.records import StepRecord
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

    def single(self, run: PlannedRun) -> PretrainRecipe:
        """Return the recipe of one run: a trial's with its values, a final run's with the chosen ones."""
        values = run.point or self.tuning.chosen(run.variant)
        return self.recipe.single(run.variant, values, run.seed, trial=bool(run.point))

    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of one run."""
        return identify_model(self.shared, self.single(run), self.plans[run.seed])


def set_up_study(recipe: StudyRecipe, tuning: Tuning, progress: Progress) -> StudySetup:
    """Load the text and try every variant on the meta device, so that a mistake shows before any training.

    Raises:
        HfpatchError: if the text cannot be loaded, or a variant cannot be built or trained.
    """
    trials = recipe.tuning
    tokenizer, splits = load_text(recipe, progress, tuning=trials.held_out if trials is not None else 0)
    recipe = recipe.model_copy(update={"training": with_steps(recipe.training, len(splits.train))})
    plans = draw_plans(recipe.training, splits.train, recipe.training.all_seeds)
    if trials is not None and splits.tuning is not None:
        of_trials = recipe.training.replaced(trial_changes(recipe.training, trials))
        plans |= draw_plans(of_trials, splits.train, [recipe.tuning_seed])
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
        plans=plans,
        shared=identify_data(tokenizer, splits),
        tuning=replace(tuning, untrained=math.log(len(tokenizer))),
        tuning_text=splits.tuning,
        cautions=splits.cautions,
        tokenizer=tokenizer,
        sizes=sizes,
    )


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


def identify_model(shared: Identity, recipe: PretrainRecipe, plan: BatchPlan) -> Identity:
    """Return the identity of a run that trains a recipe's model."""
    return identify_training(shared, recipe.training, plan, architecture=hash_values(recipe.architecture))


def train_model(
    recipe: PretrainRecipe,
    *,
    tokenizer: PreTrainedTokenizerBase,
    blocks: TokenBlocks,
    held_out: TokenBlocks | None,
    plan: BatchPlan,
    folder: Path,
    origin: Identity,
    on_step: Callable[[StepRecord], None],
    save: bool = True,
) -> tuple[PreTrainedModel, TrainResult]:
    """Train a recipe's model from its newest checkpoint in ``folder``, where there is one, and ``save`` it there."""
    model = build_model(recipe.architecture, tokenizer=tokenizer, seed=recipe.seed)
    require_causal(model, "architecture")
    check_blocks(model, blocks, held_out)
    outcome = pretrain(
        model,
        settings=recipe.training,
        blocks=blocks,
        plan=plan,
        evaluation_blocks=held_out,
        tokenizer=tokenizer,
        seed=recipe.seed,
        run_dir=folder,
        resume=True,
        on_step=on_step,
        origin=origin.to_json(),
        save=save,
    )
    return model, outcome
