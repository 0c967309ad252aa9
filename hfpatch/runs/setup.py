"""The inputs that all runs of a comparison share: the base, the training blocks, the batch plans and the methods."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.documents import Documents, describe_documents
from hfpatch.data.load import Splits, load_splits
from hfpatch.data.plan import BatchPlan, draw_plans
from hfpatch.data.tokenizer import check_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.nn.matmul import choose_library
from hfpatch.recipes.budgets import TOLERANCE, budget_in
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import Asked
from hfpatch.recipes.training import LoopSettings, with_steps
from hfpatch.recipes.tuning import point_name, trial_changes
from hfpatch.runs.folder import require_saved
from hfpatch.runs.identity import identify_base, identify_data, identify_training
from hfpatch.runs.plan import PlannedRun
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Identity
from hfpatch.runs.tuning import Tuning
from hfpatch.support.code import hash_code
from hfpatch.support.cpu import MatmulLibrary
from hfpatch.support.files import check_data_dir, hash_values
from hfpatch.support.folders import cache_folder
from hfpatch.surgery.bases import Base, check_place, hash_weights, load_base, place_base, require_causal
from hfpatch.surgery.budget import Trial
from hfpatch.surgery.folder import load_patch
from hfpatch.surgery.methods import Method, build_method, validate_methods
from hfpatch.surgery.patch import PatchSummary, patch, patch_summary, unpatch
from hfpatch.surgery.scale import scale_patch
from hfpatch.training.run import Run, check_blocks
from hfpatch.training.sharding import cuts_tensors
from hfpatch.training.trackers import check_trackers

_METHOD_WITHOUT = {"base_model_name_or_path", "revision", "inference_mode", "peft_version"}


@dataclass(frozen=True, kw_only=True)
class Setup(ABC):
    """What all runs of a comparison, or of a study, share, checked before any of them.

    Attributes:
        recipe: the recipe.
        tokenizer: the tokenizer of all texts.
        blocks: the training text.
        held_out: the text that the loss is measured on, if any.
        plans: the batch plan of each seed, that of tuning included.
        shared: the hashes of base, tokenizer and text.
        matmul: the library for matrix products of all runs; None where the base is not on the CPU, and in pretraining,
            where each run chooses its own and keeps it in its checkpoints.
        tuning: the trials; none where the recipe does not tune.
        tuning_text: the text that the loss of the trials is measured on.
        cautions: which documents of the training text are in the tasks, too.
        left_out: methods of the recipe that reach no size near their budget, with the reason; ``recipe``, ``methods``
            and ``sizes`` are without them.
    """

    recipe: Recipe | StudyRecipe
    tokenizer: PreTrainedTokenizerBase
    blocks: TokenBlocks
    held_out: TokenBlocks | None
    plans: dict[int, BatchPlan]
    shared: Identity
    matmul: MatmulLibrary | None = None
    tuning: Tuning = field(default_factory=Tuning)
    tuning_text: TokenBlocks | None = None
    cautions: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    @abstractmethod
    def questions(self) -> list[Asked]:
        """The primary questions of the comparison."""

    @abstractmethod
    def saved(self, run: PlannedRun) -> AbstractContextManager[PreTrainedModel]:
        """Yield the model that a run has trained, or the bare base."""

    @abstractmethod
    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of one run."""

    def training(self, run: PlannedRun, settings: LoopSettings, identity: Identity, progress: Progress) -> Run:
        """Return the training of one run; a trial's does not measure the held-out text."""
        return Run(
            settings,
            self.blocks,
            self.plans[run.seed],
            run.seed,
            run.folder,
            origin=identity.to_json(),
            held_out=None if run.point else self.held_out,
            on_step=partial(progress.stepped, run.name),
        )

    @cached_property
    def held_out_documents(self) -> Documents:
        """The hashes and lengths of the held-out documents."""
        assert self.held_out is not None
        return describe_documents(self.held_out, self.tokenizer)

    @cached_property
    def tuning_size(self) -> dict[str, int]:
        """The predicted tokens of tuning's text, their bytes, and the groups of its documents where these have some."""
        assert self.tuning_text is not None
        tokens = self.tuning_text.count_predicted(range(len(self.tuning_text)))
        documents = describe_documents(self.tuning_text, self.tokenizer)
        groups = {} if documents.groups is None else {"groups": len({*documents.groups.tolist()})}
        return {"predicted_tokens": tokens, "bytes": int(documents.bytes.sum()), **groups}


@dataclass(frozen=True, kw_only=True)
class ComparisonSetup(Setup):
    """The inputs of a comparison of patches.

    Attributes:
        base: the frozen model and its tokenizer.
        methods: the adapters of each method; those of one run of a tuned method are found by `method_of`.
        sizes: the parameters that each method adds and trains.
        retained: the texts of ``retention``, by name.
        tasks: each task, and whether it scores whole texts.
    """

    recipe: Recipe
    base: Base
    methods: dict[str, Method]
    sizes: dict[str, PatchSummary]
    retained: Mapping[str, TokenBlocks] = field(default_factory=dict)
    tasks: Mapping[str, bool] = field(default_factory=dict)

    @cached_property
    def questions(self) -> list[Asked]:
        """The primary questions of the comparison."""
        return self.recipe.asked({name: size.trainable for name, size in self.sizes.items()}, self.tasks)

    def recipe_of(self, run: PlannedRun) -> Recipe:
        """Return the recipe of one run: a trial's with its values, a final run's with the chosen ones."""
        if run.point:
            return self.recipe.tuned(run.variant, run.point, trial=True)
        values = self.tuning.chosen(run.variant)
        return self.recipe.tuned(run.variant, values) if values else self.recipe

    def method_of(self, run: PlannedRun) -> Method:
        """Return the method of one run."""
        parts = self.recipe_of(run).methods
        if parts == self.recipe.methods:
            return self.methods[run.variant]
        return build_method(self.base.model, parts, run.variant)

    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of one run; the bare base is evaluated only, and has no plan."""
        if run.variant in self.left_out:  # nothing is run
            return self.shared
        method = self.method_of(run)
        if not method.configs:
            return self.shared
        # The method's settings, every default and the solved rank included, and its code
        configs = [config.to_dict() for config in method.configs]
        kept = [{key: value for key, value in config.items() if key not in _METHOD_WITHOUT} for config in configs]
        of_method = hash_values([kept, hash_code(method.classes)])
        return identify_training(self.shared, self.recipe_of(run).training, self.plans[run.seed], method=of_method)

    @cached_property
    def retained_documents(self) -> dict[str, Documents]:
        """The same of each text of ``retention``."""
        return {name: describe_documents(blocks, self.base.tokenizer) for name, blocks in self.retained.items()}

    def identify_retention(self, run: PlannedRun) -> Identity:
        """Return the identity of one run's scores on the texts of ``retention``."""
        texts = hash_values({name: blocks.sha256 for name, blocks in self.retained.items()})
        return self.identify(run).model_copy(update={"retention_text": texts})

    def identify_scores(self) -> dict[str, dict[str, str]]:
        """Return the hashes of each task and of its prompts."""
        from hfpatch.evaluation.harness import quiet
        from hfpatch.evaluation.selection import select
        from hfpatch.evaluation.sizing import collect_requests

        with quiet():
            chosen = select(self.recipe.evaluation, self.recipe.data_dir)
        asked = collect_requests(self.base.model, self.base.tokenizer, chosen)
        return {task: requests.identity for task, requests in asked.items()}

    def saved(self, run: PlannedRun) -> AbstractContextManager[PreTrainedModel]:
        """Yield the base with the patch that a run has saved."""
        return self.patched(run, run.paths.patch)

    @contextmanager
    def patched(self, run: PlannedRun, saved: Path | None = None, *, scale: float = 1.0) -> Iterator[PreTrainedModel]:
        """Yield the base with a run's method in it; afterwards take it out again and verify the base by hash.

        Args:
            run: the run; nothing is put in for the baseline.
            saved: the patch to load; None puts in new modules.
            scale: the factor of a saved patch's change.

        Raises:
            HfpatchError: if the saved patch is gone, or the base's own weights changed meanwhile.
        """
        model, method = self.base.model, self.method_of(run)
        if not method.configs:
            yield model
            return
        if saved is None:
            patch(model, method.configs, seed=run.seed)
        else:
            require_saved(saved)
            load_patch(model, saved, scale=scale)
        try:
            yield model
        finally:
            unpatch(model)
        if hash_weights(model) != self.base.sha256:
            if saved is None:
                shutil.rmtree(run.folder, ignore_errors=True)  # else a resumed training would end without a step
            raise HfpatchError(
                f"methods.{run.variant} changed the base's own weights, so that nothing measured with it can be "
                "trusted; leave out options that train the base, such as LoRA's bias or modules_to_save"
            )


def set_up(recipe: Recipe, tuning: Tuning | None = None, progress: Progress | None = None) -> ComparisonSetup:
    """Load what the recipe names and try each method on the base, so that a mistake shows before any training.

    Args:
        recipe: the recipe.
        tuning: its trials. Where they are of one method and there are none, as in `train` without tuning, the tasks are
            not loaded: documents of the tasks are then trained on, and `compare` refuses such a folder.
        progress: called at each step.

    Raises:
        HfpatchError: if the base, the data or the tasks cannot be loaded, or a method does not fit the base.
    """
    progress = progress or Progress()
    check_data_dir(recipe.data_dir)
    check_trackers(recipe.training.report_to)
    validate_methods(recipe.methods)
    if recipe.model.device_map is not None and PartialState().num_processes > 1:
        raise HfpatchError(
            "model.device_map says where one process puts the base, and there are "
            f"{PartialState().num_processes}, each with a device of its own; leave it out, or start one process"
        )
    progress.preparing(recipe.model.loading_text)
    base = load_base(recipe.model.name, **recipe.model.loading)
    require_causal(base.model, recipe.model.name)
    check_place(base, PartialState().device)
    check_tokenizer(base.model, base.tokenizer)
    of_base = identify_base(base)
    progress.preparing("trying every method on the base")
    methods = {name: build_method(base.model, recipe.methods, name) for name in recipe.methods}
    recipe, left_out = _without_unreachable(recipe, methods)
    methods = {name: methods[name] for name in recipe.methods}
    sizes = _check_methods(recipe, base, methods)
    is_whole = tuning is None or tuning.part is None
    splits, are_texts = _read_texts(
        recipe, base, progress, with_tasks=is_whole or recipe.tuning is not None, with_retained=is_whole
    )
    training = with_steps(recipe.training, len(splits.train))
    recipe = recipe.model_copy(update={"training": training})
    recipe.check_trials()  # the steps of epochs are known only now
    shared = of_base.model_copy(update=identify_data(base.tokenizer, splits).to_json())
    if not cuts_tensors():  # sharded weights are placed shard by shard
        place_base(base, PartialState().device)
    return ComparisonSetup(
        recipe=recipe,
        base=base,
        tokenizer=base.tokenizer,
        blocks=splits.train,
        held_out=splits.held_out,
        plans=draw_all_plans(recipe, splits),
        methods=methods,
        sizes=sizes,
        shared=shared,
        matmul=choose_library(base.model),
        tuning=tuning or Tuning(),
        tuning_text=splits.tuning,
        cautions=splits.cautions,
        left_out=left_out,
        retained=splits.retained,
        tasks=are_texts,
    )


def draw_all_plans(recipe: Recipe | StudyRecipe, splits: Splits) -> dict[int, BatchPlan]:
    """Return the batch plan of each seed, and that of the trials of tuning by theirs."""
    plans = draw_plans(recipe.training, splits.train, recipe.training.all_seeds)
    if recipe.tuning is not None:
        of_trials = recipe.training.replaced(trial_changes(recipe.training, recipe.tuning))
        plans |= draw_plans(of_trials, splits.train, [recipe.tuning_seed])
    return plans


def _read_texts(
    recipe: Recipe, base: Base, progress: Progress, *, with_tasks: bool, with_retained: bool
) -> tuple[Splits, dict[str, bool]]:
    """Return the tokenised texts of a recipe, and by task whether it scores texts."""
    tasks, are_texts = None, dict[str, bool]()
    measured = recipe.retention if with_retained else None
    if with_tasks:
        from hfpatch.evaluation.selection import select
        from hfpatch.evaluation.tasks import task_documents

        progress.preparing("reading the documents of the tasks")
        selected = select(recipe.evaluation, recipe.data_dir).tasks
        tasks = task_documents(selected)
        are_texts = {name: task.OUTPUT_TYPE == "loglikelihood_rolling" for name, task in selected.items()}
    progress.preparing(f"reading and tokenising {recipe.data.named}")
    with PartialState().local_main_process_first():  # the others find the tokens in the cache
        splits = load_splits(
            recipe.data,
            base.tokenizer,
            data_dir=recipe.data_dir,
            cache_dir=cache_folder("tokens"),
            tuning=recipe.tuning.held_out if recipe.tuning is not None else 0,
            tasks=tasks,
            retained=None if measured is None else measured.data(recipe.model.name, recipe.data),
        )
    check_blocks(base.model, splits.train, splits.held_out)
    for text in splits.retained.values():
        check_blocks(base.model, text)
    return splits, are_texts


def _without_unreachable(recipe: Recipe, methods: Mapping[str, Method]) -> tuple[Recipe, dict[str, str]]:
    """Return a recipe without the methods whose nearest size is too far from their budget, and why for each of them.

    Raises:
        HfpatchError: if none is left.
    """
    left_out = {}
    for name, method in methods.items():
        match = method.match
        if match is not None and budget_in(name) and abs(match.difference) > TOLERANCE:
            value = f"{match.value:g}" if isinstance(match.value, int | float) else str(match.value)
            left_out[name] = (
                f"its nearest size, {match.size}={value}, has {match.parameters:,} parameters, and its budget is "
                f"{match.target_parameters:,}"
            )
    if not left_out:
        return recipe, left_out
    kept = [name for name in recipe.trained if name not in left_out]
    if not kept:
        first, reason = next(iter(left_out.items()))
        raise HfpatchError(f"budgets: no method reaches any; {first}: {reason}")
    return recipe.only(kept), left_out


def _check_methods(recipe: Recipe, base: Base, methods: Mapping[str, Method]) -> dict[str, PatchSummary]:
    """Try every method on the base, also with the values of tuning's grid, and return the sizes.

    Raises:
        HfpatchError: if a method does not fit the base; if its change is no sum that ``rewind`` can scale; or if the
            grid has an option that it does not have, or that changes its number of parameters.
    """
    sizes = {name: _measure(base, method) for name, method in methods.items()}
    for name, method in methods.items() if recipe.rewind else ():
        try:
            if method.configs:
                Trial(base.model)(method.configs, look=lambda twin: scale_patch(twin, 0.5))
        except HfpatchError as error:
            raise HfpatchError(f"rewind: methods.{name}: {error}; leave the method or rewind out") from error
    trained = {name: recipe.methods[name] for name in recipe.trained}
    for name in trained:
        for values in recipe.tuning.combinations(name, trained) if recipe.tuning is not None else ():
            parts = recipe.tuned(name, values).methods
            if parts == recipe.methods:
                continue
            try:
                validate_methods(parts)
                size = _measure(base, build_method(base.model, parts, name))
            except HfpatchError as error:
                raise HfpatchError(f"tuning.grid: {error}") from error
            if size.trainable != sizes[name].trainable:
                shown = point_name(values).replace(",", ", ")
                raise HfpatchError(
                    f"tuning.grid: {shown} gives {name} {size.trainable:,} trained parameters in place of "
                    f"{sizes[name].trainable:,}, so it would not match others; tune options that keep its size"
                )
    return sizes


def _measure(base: Base, method: Method) -> PatchSummary:
    """Return the parameter counts of a method, tried on a twin of the base without values."""
    if not method.configs:
        return replace(patch_summary(base.model), trainable=0)
    try:
        counts: PatchSummary = Trial(base.model)(method.configs)
        return counts
    except HfpatchError as error:
        raise HfpatchError(f"methods.{method.name}: {error}") from error
