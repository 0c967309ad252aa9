"""What all runs of a comparison share: the base, the training blocks, the batch plans and the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.load import load_splits
from hfpatch.data.plan import BatchPlan, draw_plans
from hfpatch.data.vocabulary import check_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.nn.matmul import MatmulLibrary, choose_library
from hfpatch.recipes.comparison import Recipe
from hfpatch.runs.identity import Identity, identify_base, identify_data, identify_method, identify_training
from hfpatch.runs.plan import PlannedRun
from hfpatch.support.cache import cache_folder
from hfpatch.support.files import check_data_dir
from hfpatch.surgery.bases import Base, hash_weights, load_base
from hfpatch.surgery.budget import Trial
from hfpatch.surgery.methods import Method, build_method, validate_methods
from hfpatch.surgery.patch import PatchSummary, patch_summary, unpatch
from hfpatch.training.run import check_blocks
from hfpatch.training.sharding import cuts_tensors
from hfpatch.training.trackers import check_trackers


@dataclass(frozen=True)
class ComparisonSetup:
    """What all runs of a comparison share; everything is checked before any of them.

    Attributes:
        recipe: the recipe.
        base: the frozen model and its tokenizer.
        blocks: what is trained on.
        held_out: what the loss is measured on, if anything.
        plans: the batch plan of each seed.
        methods: what each method puts into the base.
        sizes: the parameters that each method adds and trains.
        shared: the hashes of base, tokenizer and text.
        matmul: the library for matrix products of all runs; None where the base is not on the CPU.
    """

    recipe: Recipe
    base: Base
    blocks: TokenBlocks
    held_out: TokenBlocks | None
    plans: dict[int, BatchPlan]
    methods: dict[str, Method]
    sizes: dict[str, PatchSummary]
    shared: Identity
    matmul: MatmulLibrary | None

    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of one run; the bare base is evaluated only, and has no plan."""
        method = self.methods[run.variant]
        if not method.configs:
            return self.shared
        training = identify_training(self.recipe.training, self.plans[run.seed])
        return {**self.shared, **identify_method(method), **training}

    @contextmanager
    def patched(self, method: str, put: Callable[[PreTrainedModel, Method], object]) -> Iterator[PreTrainedModel]:
        """Yield the base with a method in it; afterwards take it out again and verify the base by hash.

        Args:
            method: the method's name; nothing is put in for the baseline.
            put: puts new modules, or those of a saved patch, into the base.

        Raises:
            HfpatchError: if the base's own weights changed meanwhile.
        """
        model = self.base.model
        if not self.methods[method].configs:
            yield model
            return
        put(model, self.methods[method])
        try:
            yield model
        finally:
            unpatch(model)
        if hash_weights(model) != self.base.sha256:
            raise HfpatchError(
                f"methods.{method} changed the base's own weights, so that nothing measured with it can be trusted; "
                "leave out options that train the base, such as LoRA's bias or modules_to_save"
            )


def set_up(recipe: Recipe) -> ComparisonSetup:
    """Load what the recipe names and try each method on the base, so that a mistake shows before any training.

    Raises:
        HfpatchError: if the base or the data cannot be loaded, or a method does not fit the base.
    """
    check_data_dir(recipe.data_dir)
    check_trackers(recipe.training.report_to)
    validate_methods(recipe.methods)
    base = load_base(recipe.model.name, revision=recipe.model.revision, dtype=recipe.model.dtype)
    check_tokenizer(base.model, base.tokenizer)
    of_base = identify_base(base)
    methods = {name: build_method(base.model, recipe.methods, name) for name in recipe.methods}
    sizes = {name: _measure(base, method) for name, method in methods.items()}
    with PartialState().local_main_process_first():  # the others find the tokens in the cache
        splits = load_splits(recipe.data, base.tokenizer, data_dir=recipe.data_dir, cache_dir=cache_folder("tokens"))
    check_blocks(base.model, splits.train, splits.held_out)
    plans = draw_plans(recipe.training, splits.train, recipe.training.seeds)
    if not cuts_tensors():  # what is cut in pieces goes to the devices piece by piece
        base.model.to(PartialState().device)
    return ComparisonSetup(
        recipe=recipe,
        base=base,
        blocks=splits.train,
        held_out=splits.held_out,
        plans=plans,
        methods=methods,
        sizes=sizes,
        shared=of_base | identify_data(base.tokenizer, splits.train, splits.held_out),
        matmul=choose_library(base.model),
    )


def _measure(base: Base, method: Method) -> PatchSummary:
    """Return the parameter counts of a method, tried on a twin of the base without values."""
    if not method.configs:
        return replace(patch_summary(base.model), trainable=0)
    try:
        counts: PatchSummary = Trial(base.model)(method.configs)
        return counts
    except HfpatchError as error:
        raise HfpatchError(f"methods.{method.name}: {error}") from error
