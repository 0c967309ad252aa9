"""Pretraining recipes: one model from scratch, or a study that compares variants of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.compared import ComparedRecipe, NamedRecipe
from hfpatch.recipes.data import DataSettings, check_decided
from hfpatch.recipes.questions import HELD_OUT, MARGINS, Asked, QuestionSettings
from hfpatch.recipes.strict import PathText, Section, Seed, check_names, explain, find_recipe, load_as, read_yaml
from hfpatch.recipes.training import PretrainSettings, StudySettings, check_held_out
from hfpatch.recipes.tuning import TuningSettings, Values, check_tuning, point_name, refuse_rate, trial_changes

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
            raise ValueError("give train_vocab_size or path, not both")
        return self


class _Pretraining(NamedRecipe):
    """The keys of a run and of all of them."""

    architecture: dict[str, Any]
    """``model_type``, the keys of its configuration class, and ``query``, ``pre_projection``, ``biases``,
    ``mlp_width``."""
    tokenizer: TokenizerSettings
    """The tokenizer."""
    evaluation_data: DataSettings | None = None
    """Text whose loss is measured: ``held_out`` of its documents or, without it, all that are not trained on; None
    takes the documents held out of ``data``."""
    training: PretrainSettings = PretrainSettings()
    """The optimiser and its schedule."""

    @property
    def measures_held_out(self) -> bool:
        """Whether there is text whose loss is measured."""
        return self.data.held_out is not None or self.evaluation_data is not None


class PretrainRecipe(_Pretraining):
    """What one run trains: a variant of a study, with one seed."""

    seed: Seed = 0
    """Fixes initialisation and batch plan."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> PretrainRecipe:
        check_held_out(self.training, measured=self.measures_held_out)
        return self


class VariantTuning(Section):
    """How the trials of one variant differ from the study's; the report says so where it has more of them, or fewer."""

    learning_rates: tuple[PositiveFloat, ...] | None = None
    """Its rates; None takes those of ``tuning``."""
    grid: dict[str, list[Any]] | None = None
    """Its grid; None takes that of ``tuning``."""


class Variant(Section):
    """How one variant of a study differs; each key replaces the recipe's as a whole."""

    description: str = ""
    """One sentence for the report."""
    architecture: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``architecture``, such as ``query: {path: nonlinear}``."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``training``, such as ``weight_decay: 0.03125``."""
    tuning: VariantTuning | None = VariantTuning()
    """The variant's own rates or grid; null does not tune it, and takes ``lr`` of ``training``."""


class StudyQuestions(QuestionSettings):
    """The primary question of a study: is a variant better than another one?"""

    keep: None = None
    """Not asked: there is no pretrained base."""


class StudyRecipe(_Pretraining, ComparedRecipe):
    """A model, or variants of it, each trained from scratch on the same batches with every seed."""

    training: StudySettings = StudySettings()
    """The optimiser, its schedule and the seeds."""
    questions: StudyQuestions = StudyQuestions()
    """What the study is to decide. Without ``pairs``: is each variant better than the baseline on held-out text?"""
    margin: dict[str, PositiveFloat | None] = Field(default_factory=dict)
    """The difference that does not matter, ``{nats_per_token: 0.02}``; null claims signs alone."""
    baseline: str = ""
    """The variant that all others are compared with."""
    variants: dict[str, Variant] = Field(default_factory=dict)
    """The variants to compare, in the order of the reports. A file without them is one model: a variant of its name."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> StudyRecipe:
        check_names(*self.variants)
        if not self.baseline:
            raise ValueError("give baseline, the variant that all others are compared with")
        if self.baseline not in self.variants:
            hint = nearest(self.baseline, self.variants)
            raise ValueError(f"baseline is {self.baseline!r}, which is not among variants{hint}")
        if len(self.variants) > 1 and not self.measures_held_out:
            raise ValueError("a study compares the loss on held-out text, and there is none; set data.held_out")
        check_decided(self.data, self.data.held_out is not None or self.tuning is not None)
        if self.evaluation_data is not None and self.evaluation_data.mixture:
            raise HfpatchError(
                "evaluation_data measures one text, and evaluation_data.mixture lists several; leave it out"
            )
        self.check_questions(self.variants, of="variants", measures=("nats_per_token",))
        for name in self.variants:
            self._check_runs(name)
        return self

    def _check_runs(self, name: str) -> None:
        """Refuse a variant of which a run, or a trial, is no recipe or sees other batches than those of all others."""
        given = self.variants[name].tuning or VariantTuning()
        if self.tuning is None and (given.learning_rates or given.grid):
            raise ValueError(f"variants.{name}.tuning changes tuning, but the recipe has no tuning; add it")
        try:
            tuning = self.tuning_of(name)
        except ValidationError as error:
            raise ValueError(f"variants.{name}: tuning.{explain(error, TuningSettings)}") from None
        combinations = list[Values]([{}])
        if tuning is not None:
            try:
                check_tuning(tuning, self.training, self.data, {name: []})
            except HfpatchError as error:
                raise HfpatchError(f"{error}" if tuning == self.tuning else f"variants.{name}: {error}") from None
            if "lr" in self.variants[name].training:
                raise ValueError(
                    f"variants.{name}.training.lr fixes the rate that tuning chooses; leave it out, or set "
                    f"variants.{name}.tuning: null"
                )
            combinations = tuning.combinations(name, {})
        for values in combinations:
            where = f"variants.{name}{' at ' * bool(values)}{point_name(values)}"
            try:
                run = self.single(name, values, 0)
                if tuning is not None:
                    self.single(name, values, 0, trial=True)
            except ValidationError as error:
                raise ValueError(f"{where}: {explain(error, PretrainRecipe)}") from None
            for key in _SHARED:
                if getattr(run.training, key) != getattr(self.training, key):
                    raise ValueError(
                        f"{where}: training.{key} must be the same for all, which are compared on the same batches"
                    )

    @property
    def methods(self) -> dict[str, list[dict[str, Any]]]:
        """The variants as methods of a comparison: they have no parts, as there is no base to put them in."""
        return {name: [] for name in self.variants}

    @property
    def trained(self) -> list[str]:
        """The variants, all of which are trained."""
        return list(self.variants)

    @property
    def margins(self) -> dict[str, float]:
        """The margin of each measure and text that has one: those of the recipe, else the defaults."""
        return {name: value for name, value in {**MARGINS, **self.margin}.items() if value is not None}

    def tuning_of(self, variant: str) -> TuningSettings | None:
        """Return the trials of a variant; None where it is not tuned."""
        changes = self.variants[variant].tuning
        if self.tuning is None or changes is None:
            return None
        return self.tuning.replaced(changes.model_dump(exclude_none=True))

    def asked(self) -> list[Asked]:
        """Return the primary question, if it is asked."""
        if self.questions.gain is None:
            return []
        others = [name for name in self.variants if name != self.baseline]
        pairs = self.questions.gain.pairs or tuple((name, self.baseline) for name in others)
        return [Asked(question="gain", pairs=list(pairs), on=[HELD_OUT])] if pairs else []

    def single(self, variant: str, values: Mapping[str, Any], seed: int, *, trial: bool = False) -> PretrainRecipe:
        """Return the recipe of one run, a final one or a trial of tuning, at the values of a trial."""
        changes = self.variants[variant]
        training = self.training.model_dump(mode="json", exclude={"seeds"}) | changes.training
        if trial and self.tuning is not None:
            training |= trial_changes(self.training, self.tuning)
        for key, value in values.items():
            first, _, rest = key.partition(".")
            training[first] = {**training[first], rest: value} if rest else value
        return PretrainRecipe.model_validate_json(
            json.dumps(
                {
                    **self.model_dump(mode="json", include={"data", "tokenizer", "data_dir", "evaluation_data"}),
                    "name": f"{self.name}-{variant}",
                    "description": changes.description,
                    "architecture": self.architecture | changes.architecture,
                    "training": training,
                    "seed": seed,
                }
            ),
            strict=True,
        )


def load_pretraining(path: Path | str, overrides: Sequence[str] = (), *, trust_code: bool = False) -> StudyRecipe:
    """Read a pretraining recipe, as `load_recipe`."""
    study = load_study(path, overrides, trust_code=trust_code)
    if study is None:
        raise HfpatchError(f"{path}: compares methods on a base; use hfpatch compare")
    return study


def load_study(path: Path | str, overrides: Sequence[str] = (), *, trust_code: bool = False) -> StudyRecipe | None:
    """Read a pretraining recipe, as `load_recipe`; None if it is a comparison of methods on a base."""
    if not {"architecture", "tokenizer", "variants"} & read_yaml(find_recipe(Path(path))).keys():
        return None
    study = load_as(path, overrides, StudyRecipe, trust_code=trust_code, rearranged=_with_variants)
    refuse_rate(overrides, is_tuned=all(study.tuning_of(name) is not None for name in study.variants))
    return study


def _with_variants(values: dict[str, Any]) -> dict[str, Any]:
    name = str(values.get("name"))
    return values if "variants" in values else {"baseline": name, **values, "variants": {name: {}}}
