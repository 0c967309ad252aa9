"""What every run of a comparison shares: the base, the training blocks and the batch plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.load import load_splits
from hfpatch.data.plan import BatchPlan, draw_plan
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.model import check_tokenizer
from hfpatch.nn.matmul import MatmulLibrary, choose_library
from hfpatch.recipes.comparison import Recipe
from hfpatch.runs.identity import Identity, identify_base, identify_data, identify_method, identify_training
from hfpatch.support.cache import cache_folder
from hfpatch.support.files import check_data_dir
from hfpatch.surgery.bases import Base, hash_weights, load_base
from hfpatch.surgery.budget import meta_twin
from hfpatch.surgery.methods import Method, build_method, validate_methods
from hfpatch.surgery.patch import PatchSummary, patch, patch_summary, unpatch
from hfpatch.training.run import check_blocks
from hfpatch.training.sharding import cuts_tensors
from hfpatch.training.trackers import check_trackers


@dataclass(frozen=True)
class Bench:
    """A base, its training blocks, one batch plan a seed, what each method adds and the identity that all runs share.

    Everything is checked before any run.
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

    def identify(self, method: str, seed: int) -> Identity:
        """Return the identity of a method's run with a seed; the bare base is evaluated only, and has no plan."""
        if not self.methods[method].configs:
            return self.shared
        chosen = identify_method(self.methods[method])
        return {**self.shared, **chosen, **identify_training(self.recipe.training, self.plans[seed])}

    @contextmanager
    def patched(self, method: str, put: Callable[[PreTrainedModel, Method], object]) -> Iterator[PreTrainedModel]:
        """Yield the base with a method in it; afterwards take it out again and verify the base by hash.

        Args:
            method: the method's name; nothing is put in for the baseline.
            put: puts the method's modules into the base, new ones or those of a saved patch.

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
        self.verify(method)

    def verify(self, method: str) -> None:
        """Refuse to go on if the base's weights are no longer those it was loaded with."""
        if hash_weights(self.base.model) != self.base.sha256:
            raise HfpatchError(
                f"methods.{method} changed the base's own weights, so that nothing measured with it can be trusted; "
                "leave out options that train the base, such as LoRA's bias or modules_to_save"
            )


def set_up(recipe: Recipe) -> Bench:
    """Load what the recipe names and try each method on the base, so that a mistake shows before any training.

    Raises:
        HfpatchError: if the base, the data or a method cannot be had as the recipe says.
    """
    check_data_dir(recipe.data_dir)
    check_trackers(recipe.training.report_to)
    validate_methods(recipe.methods)
    base = load_base(recipe.model.name, revision=recipe.model.revision, dtype=recipe.model.dtype)
    check_tokenizer(base.model, base.tokenizer)
    identity = identify_base(base)
    methods = {name: build_method(base.model, recipe.methods, name) for name in recipe.methods}
    sizes = {name: _measure(base, name, method) for name, method in methods.items()}
    with PartialState().local_main_process_first():  # the others find the tokens in the cache
        splits = load_splits(recipe.data, base.tokenizer, data_dir=recipe.data_dir, cache_dir=cache_folder("tokens"))
    blocks, training = splits.train, recipe.training
    check_blocks(base.model, blocks, splits.held_out)
    plans = {
        seed: draw_plan(blocks=len(blocks), steps=training.steps, batch_size=training.batch_size, seed=seed)
        for seed in training.seeds
    }
    identity |= identify_data(base.tokenizer, blocks, splits.held_out)
    if not cuts_tensors():  # what is cut in pieces goes to the devices piece by piece
        base.model.to(PartialState().device)
    library = choose_library(base.model)
    return Bench(recipe, base, blocks, splits.held_out, plans, methods, sizes, identity, library)


def _measure(base: Base, name: str, method: Method) -> PatchSummary:
    """Return the parameter counts of a method, tried on a twin of the base without values."""
    if not method.configs:
        return replace(patch_summary(base.model), trainable=0)
    try:
        return patch_summary(patch(meta_twin(base.model), method.configs))
    except HfpatchError as error:
        raise HfpatchError(f"methods.{name}: {error}") from error
