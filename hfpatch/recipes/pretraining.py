"""Pretraining recipes: one model from scratch, or a study that compares variants of one model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from hfpatch.errors import nearest
from hfpatch.recipes.comparison import check_names, check_once
from hfpatch.recipes.data import DataSettings, check_overlap
from hfpatch.recipes.strict import (
    SEED_LIMIT,
    ExpandedPath,
    PathText,
    Section,
    Seeds,
    explain,
    find_recipe,
    load_as,
    read_yaml,
)
from hfpatch.recipes.training import PretrainSettings, check_decay, check_held_out, check_loop

Point = dict[str, float | int | str | bool | None]
"""One point of a sweep: a value for each of its keys; empty without a sweep."""

_SEED = Annotated[NonNegativeInt, Field(lt=SEED_LIMIT)]
_SHARED = ("steps", "epochs", "batch_size")


class TokenizerSettings(Section):
    """Where a pretraining recipe's tokenizer comes from: exactly one of the two."""

    train_vocab_size: PositiveInt | None = None
    """Train a byte-level BPE of this many tokens on the training text."""
    path: PathText | None = None
    """A hub id or a local folder whose tokenizer to take."""

    @model_validator(mode="after")
    def _exactly_one(self) -> TokenizerSettings:
        if (self.train_vocab_size is None) == (self.path is None):
            raise ValueError("give train_vocab_size or path, and not both")
        return self


class _Pretraining(Section):
    """The keys of a single model and of a study."""

    name: str
    """Names the run; ``runs/<name>`` is where it goes unless ``--out`` says otherwise."""
    description: str = ""
    """One sentence."""
    architecture: dict[str, Any]
    """``model_type``, the keys of its configuration class, and ``query``, ``biases``, ``mlp_width``, ``head_size``."""
    tokenizer: TokenizerSettings
    """The tokenizer."""
    data: DataSettings
    """The training text."""
    evaluation_data: DataSettings | None = None
    """Text whose loss is measured: its held-out documents, or else all of it; None takes those held out of ``data``."""
    evaluation_blocks: PositiveInt | None = None
    """Measure the loss on so many blocks of that text, drawn once for all runs; None takes all of it."""
    training: PretrainSettings = PretrainSettings()
    """The optimiser and its schedule."""
    data_dir: ExpandedPath | None = None
    """A folder that holds local copies of hub data sets, relative to the working directory."""

    @property
    def measured(self) -> bool:
        """Whether there is text whose loss is measured."""
        return self.data.held_out is not None or self.evaluation_data is not None


class PretrainRecipe(_Pretraining):
    """A model trained from scratch."""

    seed: _SEED = 0
    """Fixes initialisation and batch plan."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> PretrainRecipe:
        check_names(self.name)
        check_loop(self.training)
        check_held_out(self.training, measured=self.measured)
        check_decay(self.training)
        if self.evaluation_data is not None:
            check_overlap(self.data, self.evaluation_data)
        return self


class Variant(Section):
    """How one variant of a study differs; each key replaces the recipe's as a whole."""

    description: str = ""
    """One sentence for the report."""
    architecture: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``architecture``, such as ``query: {path: nonlinear}``."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``training``, such as ``weight_decay: 0.03125``."""
    sweep: dict[str, list[Any]] | None = None
    """The variant's own sweep; None takes the recipe's, ``{}`` has none."""


class StudyRecipe(_Pretraining):
    """Variants of one model, each trained from scratch on the same batches with every seed."""

    seeds: Seeds = (0,)
    """One run of every variant per seed, which fixes initialisation and batches for all alike: a list of seeds, or a
    number N for 0 to N - 1."""
    baseline: str
    """The variant that all others are compared with."""
    variants: Annotated[dict[str, Variant], Field(min_length=2)]
    """The variants to compare, in the order of the reports."""
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    """Keys of ``training`` and the values that each variant is trained with, in every combination:
    ``{lr: [1e-3, 2e-3], weight_decay: [0.1, 0.03125]}``."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> StudyRecipe:
        check_once("seeds", self.seeds)
        check_names(self.name, *self.variants)
        if self.baseline not in self.variants:
            hint = nearest(self.baseline, self.variants)
            raise ValueError(f"baseline is {self.baseline!r}, which is not among variants{hint}")
        if not self.measured:
            raise ValueError("a study compares the loss on held-out text, and there is none; set data.held_out")

        # Sweeps go over single values of keys of training
        known = [name for name in PretrainSettings.model_fields if name not in _SHARED]
        sweeps = {f"variants.{name}.sweep": each.sweep or {} for name, each in self.variants.items()}
        for place, axes in {"sweep": self.sweep, **sweeps}.items():
            for key, values in axes.items():
                where = f"{place}.{key}"
                if key not in known:
                    why = (
                        "must be the same for all" if key in _SHARED else f"is no key of training{nearest(key, known)}"
                    )
                    raise ValueError(f"{where}: {key!r} {why}; a sweep goes over keys of training, such as lr")
                if not values:
                    raise ValueError(f"{where} is empty; give at least one value")
                if any(isinstance(value, (dict, list)) for value in values):
                    raise ValueError(f"{where} contains a mapping or a list; sweep over single values")
                check_once(where, values)

        # Every run is a recipe, and sees the same batches as all others
        for variant, point in ((name, point) for name in self.variants for point in self.points(name)):
            where = f"variants.{variant}{' at ' * bool(point)}{point_name(point)}"
            try:
                run = self.single(variant, point, self.seeds[0])
            except ValidationError as error:
                raise ValueError(f"{where}: {explain(error, PretrainRecipe)}") from None
            for key in _SHARED:
                if getattr(run.training, key) != getattr(self.training, key):
                    raise ValueError(
                        f"{where}: training.{key} must be the same for all, which are compared on the same batches"
                    )
        return self

    def points(self, variant: str) -> list[Point]:
        """Return the points of a variant's sweep, the last key varying fastest; one empty point without a sweep."""
        own = self.variants[variant].sweep
        axes = self.sweep if own is None else own
        return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]

    def single(self, variant: str, point: Point, seed: int) -> PretrainRecipe:
        """Return the recipe of one run, which trains the same model outside of the study."""
        values = self.model_dump(mode="json", exclude={"seeds", "baseline", "variants", "sweep"})
        chosen = self.variants[variant]
        values["architecture"] |= chosen.architecture
        values["training"] |= chosen.training
        values["training"] |= point
        # decay_steps of the study are those of its runs with wsd
        sweeps = [self.sweep, *(each.sweep or {} for each in self.variants.values())]
        tried = [each.training.get("schedule") for each in self.variants.values()]
        tried += [schedule for sweep in sweeps for schedule in sweep.get("schedule", ())]
        if values["training"]["schedule"] != "wsd" and "wsd" in (self.training.schedule, *tried):
            values["training"]["decay_steps"] = None
        values |= {"name": f"{self.name}-{variant}", "description": chosen.description, "seed": seed}
        return PretrainRecipe.model_validate_json(json.dumps(values), strict=True)


def load_pretrain_or_study(
    path: Path | str, overrides: Sequence[str] = (), *, trust_code: bool = False
) -> PretrainRecipe | StudyRecipe:
    """Read a pretraining recipe: a study if it has ``variants``, else one model; as `load_recipe` otherwise."""
    if "variants" in read_yaml(find_recipe(Path(path))):
        return load_as(path, overrides, StudyRecipe, trust_code=trust_code)
    return load_as(path, overrides, PretrainRecipe, trust_code=trust_code)


def point_name(point: Point) -> str:
    """Return a point of a sweep as a folder's name: ``lr=0.001,weight_decay=0.1``."""
    return ",".join(f"{key}={value}" for key, value in point.items())
