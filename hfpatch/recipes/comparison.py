"""Recipes: what to compare, on which model, trained and evaluated how.

A recipe is a YAML file, read strictly: an unknown key, a value of the wrong type and two options that contradict each
other are errors of one line that says where. Reading one loads neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, model_validator

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.data import DataSettings, plan_mistake
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.recipes.section import Dtype, Section
from hfpatch.recipes.strict import apply_overrides, read_yaml, validate, write_yaml
from hfpatch.recipes.training import LoopSettings, TrainingSettings
from hfpatch.support.resources import recipes_dir

Model = TypeVar("Model", bound=BaseModel)

SEED_LIMIT = 2**32
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class ModelSettings(Section):
    """The base model, which is never trained."""

    name: str = "tinyworld/gpt-neox"
    """A hub id, a local folder, ``tinyworld/gpt-neox`` or ``tinyworld/gpt2``."""
    revision: str | None = None
    """The hub revision; None takes the newest and records which one it was."""
    dtype: Dtype = "float32"
    """The dtype the base is loaded in."""


class Recipe(Section):
    """One comparison: a base, training text, evaluation tasks and the methods to compare."""

    name: str
    """Names the run; ``runs/<name>`` is where it goes unless ``--out`` says otherwise."""
    description: str = ""
    """One sentence for the report."""
    protocol: Literal["as_published", "as_it_should_be", "custom"] = "custom"
    """Which protocol the report states."""
    model: ModelSettings = ModelSettings()
    """The base model."""
    data: DataSettings = DataSettings()
    """The training text."""
    training: TrainingSettings = TrainingSettings()
    """The optimiser, its schedule and the seeds."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """The tasks."""
    data_dir: Path | None = None
    """A folder that holds local copies of hub data sets, relative to the working directory."""
    baseline: str = "baseline"
    """The method of no part that all others are compared with."""
    methods: Annotated[dict[str, list[dict[str, Any]]], Field(min_length=1)]
    """Each method is a list of parts, ``{type: pre_projection, content_skip: true}``; the baseline is ``[]``."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Recipe:
        measured = self.data.held_out is not None
        loop = loop_mistake(self.training) or held_out_mistake(self.training, measured=measured)
        for mistake in (loop, _seeds_mistake(self), _methods_mistake(self)):
            if mistake:
                raise ValueError(mistake)
        return self

    def to_yaml(self) -> str:
        """Return the recipe as YAML that `load_recipe` reads back as an equal recipe."""
        return write_yaml(self.model_dump(mode="json"))


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply dotted overrides to it.

    Args:
        path: a YAML file, or the bare name of a recipe that comes with hfpatch, such as ``quickstart``.
        overrides: ``key=value`` each, the value read as YAML: ``training.steps=60``, ``training.seeds=[0]``.

    Returns:
        The recipe, complete and free of contradictions. The keys inside a method's parts are checked by
        `hfpatch.surgery.methods.validate_methods`, which needs PEFT.

    Raises:
        HfpatchError: for each mistake a recipe can hold, naming the file, the key and what is allowed.
    """
    return load_as(path, overrides, Recipe)


def load_as(path: Path | str, overrides: Sequence[str], model: type[Model]) -> Model:
    """Read a recipe of the kind that ``model`` describes; otherwise as `load_recipe`."""
    file = find_recipe(Path(path))
    values = read_yaml(file)
    if overrides:
        values = apply_overrides(values, overrides, model)
    source = f"{file} with {' '.join(overrides)}" if overrides else str(file)
    return validate(values, model, source)


def find_recipe(path: Path) -> Path:
    """Return the file of a recipe given by path or by the bare name of one that comes with hfpatch."""
    if len(path.parts) > 1 or path.is_file():
        return path
    ours = recipes_dir() / (path.name if path.suffix in {".yaml", ".yml"} else f"{path.name}.yaml")
    if ours.is_file():  # also where a folder of that name is at hand, such as an earlier run's
        return ours
    if path.exists():
        return path
    known = sorted(file.stem for file in recipes_dir().glob("*.yaml"))
    raise HfpatchError(
        f"{path}: no such file, and no recipe of that name{nearest(path.stem, known)}; there are {', '.join(known)}"
    )


def loop_mistake(training: LoopSettings) -> str | None:
    """Return what contradicts itself in a training section, or None."""
    micro, batch = training.micro_batch_size, training.batch_size
    if micro is not None and batch % micro:
        return f"training.micro_batch_size is {micro}; must divide training.batch_size ({batch})"
    if training.warmup_steps >= training.steps:
        return f"training.warmup_steps is {training.warmup_steps}; must be below training.steps ({training.steps})"
    return plan_mistake(training.steps, batch)


def held_out_mistake(training: LoopSettings, *, measured: bool) -> str | None:
    """Return what needs a loss that is not ``measured``, or None."""
    if (training.patience or training.keep_best) and not measured:
        key = "patience" if training.patience else "keep_best"
        return f"training.{key} needs the loss on held-out text, and there is none; set data.held_out"
    return None


def _seeds_mistake(recipe: Recipe) -> str | None:
    for key, values in (("training.seeds", recipe.training.seeds), ("evaluation.tasks", recipe.evaluation.tasks)):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            return f"{key} holds {twice!r} twice; name each once"
    largest = max(recipe.training.seeds)
    return f"training.seeds holds {largest}; must be below 2**32" if largest >= SEED_LIMIT else None


def _methods_mistake(recipe: Recipe) -> str | None:
    baseline, methods = recipe.baseline, recipe.methods
    if mistake := name_mistake(recipe.name, *methods):
        return mistake
    if baseline not in methods:
        hint = nearest(baseline, methods) or f"; add '{baseline}: []'"
        return f"baseline is {baseline!r}, which is not among methods{hint}"
    if methods[baseline]:
        return f"methods.{baseline} is the baseline and must be [], the unchanged model"
    for name, parts in methods.items():
        if not parts and name != baseline:
            return f"methods.{name} has no part, which makes it a second baseline; give it one or remove it"
        for index, part in enumerate(parts):
            if mistake := _part_mistake(name, part, recipe):
                return f"methods.{name}.{index}{mistake}"
    return None


def name_mistake(*names: str) -> str | None:
    """Return the first of the names that cannot name a folder, or None."""
    wrong = next((name for name in names if not _FILE_NAME.fullmatch(name)), None)
    return (
        f"the name {wrong!r} becomes a folder; use letters, digits, '_', '-' and '.' only"
        if wrong is not None
        else None
    )


def _part_mistake(name: str, part: Mapping[str, Any], recipe: Recipe) -> str | None:
    if "type" not in part:
        return " has no type; write type: pre_projection, nonlinear_query, lora or another PEFT type"
    return match_mistake(name, part, recipe.methods)


def match_mistake(name: str, part: Mapping[str, Any], methods: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """Return what is wrong with ``match`` in a part of the method ``name``, to follow the part's place, or None."""
    if "match" not in part:
        return None
    target, others = part["match"], [other for other, parts in methods.items() if parts and other != name]
    if "r" in part:
        return " has both r and match; match finds r"
    if target not in methods:
        return f".match is {target!r}, which is not among methods{nearest(str(target), others)}"
    if target not in others:
        return f".match is {target!r}; a method can match neither itself nor the baseline"
    if any("match" in other for other in methods[target]):
        return f".match is {target!r}, which matches another method itself; match that one"
    return None
