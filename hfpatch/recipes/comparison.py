"""Recipes of comparisons: the base, the text, the methods, their training and their evaluation.

A recipe is a YAML file, read strictly: an unknown key, a value of the wrong type and two options that contradict each
other are errors of one line with the place. Reading one loads neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hfpatch.errors import HfpatchError
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.budgets import Budget, family_of, is_budget, points_of, with_points
from hfpatch.recipes.compared import ComparedRecipe
from hfpatch.recipes.data import DataSettings, check_decided
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.recipes.methods import check_chosen, check_labels, check_methods
from hfpatch.recipes.pairs import at_budgets, loras_of
from hfpatch.recipes.questions import HELD_OUT, MARGINS, SAME_SIZE, TINYWORLD_MARGINS, Asked
from hfpatch.recipes.retention import RetentionSettings, check_retention, task_of
from hfpatch.recipes.sources import TextSource
from hfpatch.recipes.strict import check_once, explain, load_as
from hfpatch.recipes.training import TrainingSettings, check_held_out
from hfpatch.recipes.tuning import (
    TuningSettings,
    Values,
    check_tuning,
    point_name,
    refuse_rate,
    split_key,
    trial_changes,
)


class Recipe(ComparedRecipe):
    """One comparison: a base, training text, evaluation tasks and the methods to compare."""

    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    baseline: str = "baseline"
    """The method of no part that all others are compared with."""
    protocol: Literal["as_published", "as_it_should_be", "custom"] = "custom"
    """Which protocol the report states."""
    model: ModelSettings = ModelSettings()
    """The base model."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """The tasks."""
    retention: RetentionSettings | None = None
    """Text and tasks that training should not change, such as ``{}`` on a tinyworld base; None measures none."""
    rewind: tuple[float, ...] = ()
    """Numbers by which the change of every trained patch is multiplied, such as ``[0.25, 0.5, 0.75]``. Each is measured
    on held-out text and ``retention``, and the text of tuning chooses one of them or 1."""
    budgets: tuple[Budget, ...] = Field(default=(), exclude=True)
    """Numbers of parameters (``65_000``) or shares of the base's (``0.1%``): every method whose size is open is trained
    at each of them, as ``lora@65k``. ``budgets`` in a method's part are its own, ``[]`` for none."""
    methods: Annotated[dict[str, list[dict[str, Any]]], Field(min_length=1)]
    """Each method is a list of parts, ``{type: pre_projection, content_skip: true}``; the baseline is ``[]``."""
    labels: dict[str, str] = Field(default_factory=dict)
    """The names of methods in the headline, tables, figures and LaTeX, which a ``label`` in a method's first part gives
    too. Files, folders and options use the names above."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Recipe:
        training, data, tasks = self.training, self.data, list(self.evaluation.tasks)
        trained = {name: self.methods[name] for name in self.trained}
        check_held_out(training, measured=data.held_out is not None)
        if self.budgets:
            raise ValueError("load_recipe reads budgets; else name methods lora@10k, with match: 10000")
        check_once("evaluation.tasks", tasks)
        if not tasks and data.held_out is None:
            raise ValueError("evaluation.tasks is [], so data.held_out must say how many documents are measured")
        check_methods(self.methods, self.baseline)
        check_labels(self.labels, self.methods)
        if self.tuning is not None:
            check_tuning(self.tuning, training, data, trained)
        check_retention(self.retention, self.model.name, data, tasks)
        self.check_questions(self.methods, tasks, list(self.texts))

        # Scales of patches
        for scale in self.rewind:
            if not math.isfinite(scale) or scale <= 0 or scale == 1:
                raise ValueError(
                    f"rewind lists {scale:g}; list positive numbers other than 1, such as 0.5 (0 is the base, 1 the "
                    "method)"
                )
        check_once("rewind", self.rewind)
        for key, value, why in (
            ("tuning", self.tuning, "whose text chooses among the scales"),
            ("retention", self.retention, "on whose text each scale is measured"),
            ("data.held_out", data.held_out, "on which each scale is measured"),
        ):
            if self.rewind and not value:
                raise ValueError(f"rewind needs {key}, {why}; set it, or leave rewind out")

        self.check_trials()  # at last, as it takes every mistake for one of tuning
        return self

    @property
    def trained(self) -> list[str]:
        """The methods that are trained: all but the baseline."""
        return [name for name in self.methods if name != self.baseline]

    @property
    def texts(self) -> dict[str, TextSource]:
        """The texts of ``retention`` by name."""
        return self.retention.sources(self.model.name) if self.retention is not None else {}

    @property
    def margins(self) -> dict[str, float]:
        """The margin of each measure and task that has one: those of the recipe, else the defaults."""
        defaults = TINYWORLD_MARGINS if self.model.name.startswith("tinyworld/") else MARGINS
        given = {task_of(name) if name in self.texts else name: value for name, value in self.margin.items()}
        return {name: value for name, value in {**defaults, **given}.items() if value is not None}

    def asked(self, sizes: Mapping[str, int], tasks: Mapping[str, bool]) -> list[Asked]:
        """Return the primary questions that have a pair and a task.

        Args:
            sizes: the trained parameters of each method.
            tasks: whether each task scores whole texts.
        """
        gain, keep, questions = self.questions.gain, self.questions.keep, list[Asked]()
        if gain is not None:
            named = list(gain.pairs or ())
            if gain.pairs is None:  # the first LoRA of each method's size
                for name in self.trained:
                    loras = loras_of(self.methods, name)
                    same = [lora for lora in loras if abs(sizes[lora] / sizes[name] - 1) <= SAME_SIZE]
                    named += [(name, lora) for lora in same[:1]]
            held_out = [HELD_OUT] if self.data.held_out is not None else []
            texts = [task for task, is_text in tasks.items() if is_text]
            on = [gain.on] if gain.on else [*held_out, *texts, *tasks][:1]
            pairs = [pair for one in named for pair in at_budgets(one, self.methods)]
            questions.append(Asked(question="gain", pairs=pairs, on=on))
        if keep is not None:
            on = [task_of(name) if name in self.texts else name for name in keep.on or ()]
            if keep.on is None:
                kept = () if self.retention is None else self.retention.tasks
                on = [*map(task_of, self.texts), *(tasks if kept is None else kept)]
            methods = self.trained if keep.methods is None else keep.methods
            pairs = [pair for name in methods for pair in at_budgets((name, self.baseline), self.methods)]
            questions.append(Asked(question="keep", pairs=pairs, on=on))
        return [question for question in questions if question.pairs and question.on]

    def tuning_of(self, method: str) -> TuningSettings | None:
        """Return the trials of a method; None where nothing is tuned."""
        return self.tuning

    def only(self, methods: Collection[str]) -> Recipe:
        """Return the recipe with some of its methods, and the baseline; ``lora`` is every budget of it.

        Raises:
            HfpatchError: if there is no such method, none is named, or one needs the size of a method that is left out.
        """
        methods = [point for name in methods for point in (points_of(name, self.methods) or [name])]
        check_chosen(methods, self.methods, self.baseline, self.name)
        kept = {name: parts for name, parts in self.methods.items() if name in {self.baseline, *methods}}
        for name, parts in kept.items():
            matched = [part["match"] for part in parts if "match" in part and not is_budget(part["match"])]
            if missing := next((other for other in matched if other not in kept), None):
                raise HfpatchError(f"--methods: {name} has the size of {missing} (match), which is left out; add it")
        labels = {name: label for name, label in self.labels.items() if name in kept}
        changes: dict[str, Any] = {"methods": kept, "labels": labels, "questions": {}}
        gain, keep, named = self.questions.gain, self.questions.keep, {*kept, *map(family_of, kept)}
        if gain is not None and gain.pairs is not None:
            changes["questions"]["gain"] = {"pairs": tuple(pair for pair in gain.pairs if named >= set(pair))}
        if keep is not None and keep.methods is not None:
            changes["questions"]["keep"] = {"methods": tuple(name for name in keep.methods if name in named)}
        if self.tuning is not None:
            grid, owners = self.tuning.grid.items(), {None, *kept}
            tried = {key: values for key, values in grid if split_key(key, self.methods)[0] in owners}
            changes["tuning"] = {"grid": tried}
        return self.replaced(changes)

    def tuned(self, method: str, values: Values, *, trial: bool = False) -> Recipe:
        """Return the recipe without tuning, at the values that a trial of one method had; or of that ``trial`` itself.

        Raises:
            ValidationError: if the values contradict each other.
        """
        training = trial_changes(self.training, self.tuning) if trial and self.tuning is not None else {}
        parts = list(self.methods[method])
        for key, value in values.items():
            first, _, rest = key.partition(".")
            if first.isdigit():
                parts[int(first)] = {**parts[int(first)], rest: value}
            elif rest:  # of a group of tensors
                training[first] = {**training.get(first, getattr(self.training, first)), rest: value}
            else:
                training[key] = value
        methods = {**self.methods, method: parts}
        return self.replaced({"training": training, "methods": methods, "tuning": None, "rewind": ()})

    def check_trials(self) -> None:
        """Refuse mistakes in trials of tuning, and in final runs at their values.

        Raises:
            HfpatchError: naming the first.
        """
        trained = {name: self.methods[name] for name in self.trained}
        runs = [(name, values) for name in trained if self.tuning for values in self.tuning.combinations(name, trained)]
        for where, trial in (("tuning.grid: ", False), ("tuning, in a trial: ", True)):
            for name, values in runs:
                try:
                    self.tuned(name, values, trial=trial)
                except ValidationError as error:
                    of = f" (at {point_name(values)}; try them in two recipes)" if len(values) > 1 else ""
                    raise HfpatchError(f"{where}{explain(error, Recipe)}{of}") from None


def load_recipe(path: Path | str, overrides: Sequence[str] = (), *, trust_code: bool = False) -> Recipe:
    """Read a recipe and apply dotted overrides to it.

    Args:
        path: a YAML file, or the bare name of a recipe that comes with hfpatch, such as ``quickstart``.
        overrides: ``key=value`` each, the value read as YAML: ``training.steps=60``, ``training.seeds=[0]``.
        trust_code: take a recipe that names code outside the installed packages; see `hfpatch.recipes.code`.

    Returns:
        The recipe, complete and free of contradictions. The keys inside a method's parts are checked by
        `hfpatch.surgery.methods.validate_methods`, which needs PEFT.

    Raises:
        HfpatchError: for each mistake in a recipe, with the file, the key and the allowed values.
    """
    recipe = load_as(path, overrides, Recipe, trust_code=trust_code, rearranged=_rearranged)
    refuse_rate(overrides, is_tuned=recipe.tuning is not None)
    check_decided(recipe.data, any((recipe.data.held_out, recipe.tuning, recipe.retention)))
    return recipe


def _rearranged(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with the budgets as methods, and the label in a method's first part in ``labels``."""
    if "architecture" in values:
        raise ValueError("has an architecture to train from scratch; use hfpatch pretrain")
    methods, labels = values.get("methods"), values.get("labels", {})
    if isinstance(methods, dict) and isinstance(labels, dict):
        methods, labels = dict(methods), dict(labels)
        for name, parts in methods.items():
            if isinstance(parts, list) and parts and isinstance(parts[0], dict) and "label" in parts[0]:
                labels.setdefault(name, parts[0]["label"])
                methods[name] = [{key: value for key, value in parts[0].items() if key != "label"}, *parts[1:]]
        values = {**values, "methods": methods, "labels": labels}
    return with_points(values)
