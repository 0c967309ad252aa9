"""Recipes of comparisons: the base, the text, the methods, their training and their evaluation.

A recipe is a YAML file, read strictly: an unknown key, a value of the wrong type and two options that contradict each
other are errors of one line with the place. Reading one loads neither torch nor transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, ValidationError, model_validator

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.budgets import Budget, budget_of, family_of, is_budget, points_of, with_points
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.recipes.questions import QuestionSettings, check_questions, margins_of
from hfpatch.recipes.retention import RetentionSettings, check_retention
from hfpatch.recipes.sizes import NO_SIZE, SIZES
from hfpatch.recipes.strict import Dtype, ExpandedPath, PathText, Section, check_once, explain, load_as, read_override
from hfpatch.recipes.training import TrainingSettings, check_decay, check_held_out, check_loop
from hfpatch.recipes.tuning import TuningSettings, Values, check_tuning, split_key, trial_changes, tuning_seed

PLACES = ("trust_remote_code", "device_map")
"""Options of loading that decide no number."""
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu|npu|hpu)(:\d+)?")
_LONGEST_LABEL = 40
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class ModelSettings(Section):
    """The base model, which is never trained."""

    name: PathText = "tinyworld/gpt-neox"
    """A hub id, a local folder, a GGUF file, ``tinyworld/gpt-neox`` or ``tinyworld/gpt2``."""
    gguf_file: str | None = None
    """A GGUF file of the hub repository or the folder ``name``, dequantised as it is loaded: the same as
    ``name: ORG/REPO/FILE.gguf``."""
    revision: str | None = None
    """The hub revision; None takes the newest and records which one it was."""
    dtype: Dtype = "float32"
    """The dtype of the base; of a quantised one the dtype of its products."""
    load_in_8bit: bool = False
    """Quantise the linear layers of the base to 8 bits with bitsandbytes (LLM.int8)."""
    load_in_4bit: bool = False
    """Quantise them to 4 bits."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit numbers: NormalFloat, or floating point."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the scales of the 4-bit numbers too."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = (
        None
    )
    """The implementation of attention; None leaves it to transformers."""
    trust_remote_code: bool = False
    """Run code that comes with the model or its tokenizer, such as an exported one's; read it before."""
    device_map: str | dict[str, int | str] | None = None
    """Where the modules of the base are: ``auto``, ``balanced``, ``sequential``, a device, or a device for each module;
    None puts all on the device of the process."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> ModelSettings:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("model.load_in_8bit and model.load_in_4bit are both on; choose one")
        changed = [key for key in self.describe() if key.startswith("bnb_4bit_")]
        if changed and not self.load_in_4bit:
            raise ValueError(f"model.{changed[0]} is of 4-bit bases; set model.load_in_4bit, or leave it out")
        if self.gguf_file is not None and not self.gguf_file.endswith(".gguf"):
            raise ValueError(f"model.gguf_file is {self.gguf_file!r}, which is no .gguf file")
        if self.gguf_file is not None and self.name.endswith(".gguf"):
            raise ValueError(f"model.name {self.name} is a GGUF file already; leave model.gguf_file out")
        if self.full_name.endswith(".gguf") and (self.load_in_8bit or self.load_in_4bit):
            raise ValueError("model.load_in_8bit and model.load_in_4bit: a GGUF file is dequantised; leave them out")
        place = self.device_map
        if isinstance(place, str) and place not in _MAPS and not DEVICE.fullmatch(place):
            raise ValueError(
                f"model.device_map is {place!r}{nearest(place, [*_MAPS, 'cpu', 'cuda'])}; use {', '.join(_MAPS)}, a "
                "device such as cuda:0, or a mapping"
            )
        return self

    @property
    def full_name(self) -> str:
        """The name, with the GGUF file where there is one."""
        return f"{self.name}/{self.gguf_file}" if self.gguf_file else self.name

    @property
    def loading(self) -> dict[str, Any]:
        """All settings but the name, as `hfpatch.surgery.bases.load_base` takes them."""
        return self.model_dump(exclude={"name"})

    @property
    def loading_text(self) -> str:
        """What takes place while it is loaded, as progress shows it."""
        bits = 8 if self.load_in_8bit else 4 if self.load_in_4bit else None
        how = f" in {bits} bits" if bits else ", whose weights are dequantised" * self.full_name.endswith(".gguf")
        return f"loading {self.full_name}{how}"

    def describe(self) -> dict[str, Any]:
        """Return the settings of loading that are not at their defaults, without name, revision and dtype."""
        return self.model_dump(mode="json", exclude={"name", "revision", "dtype"}, exclude_defaults=True)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify the model: not its devices, nor the consent to its code."""
        settings = self.model_dump(mode="json", include={"name", "revision", "dtype"})
        return settings | {key: value for key, value in self.describe().items() if key not in PLACES}


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
    tuning: TuningSettings | None = None
    """The values that every method is tried at before its final runs; None trains all at ``training.lr``."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """The tasks."""
    retention: RetentionSettings | None = None
    """Text and tasks that training should not change, such as ``{}`` on a tinyworld base; None measures none."""
    rewind: tuple[float, ...] = ()
    """Numbers by which the change of every trained patch is multiplied, such as ``[0.25, 0.5, 0.75]``. Each is measured
    on held-out text and ``retention``, and the text of tuning chooses one of them or 1."""
    questions: QuestionSettings = QuestionSettings()
    """What the comparison is to decide: the primary questions."""
    margin: dict[str, PositiveFloat | None] = Field(default_factory=dict)
    """The differences that do not matter, by task or measure (``{nats_per_token: 0.02, lambada_openai: 0.07}``), in
    their units. Without it: 0.02 ``nats_per_token``, 0.01 ``bits_per_byte`` (on tinyworld bases 0.005) and 0.01
    ``accuracy``. null claims signs alone."""
    data_dir: ExpandedPath | None = None
    """A folder that holds local copies of hub data sets, relative to the working directory."""
    baseline: str = "baseline"
    """The method of no part that all others are compared with."""
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
        check_loop(training)
        check_decay(training, *(self.tuning.grid.get("training.schedule", ()) if self.tuning else ()))
        check_held_out(training, measured=data.held_out is not None)
        if self.budgets:
            raise ValueError("load_recipe reads budgets; else name methods lora@10k, with match: 10000")
        check_once("training.seeds", training.all_seeds)
        if training.looks and self.questions == QuestionSettings(gain=None, keep=None):
            raise ValueError(
                "training.seeds.looks grows seeds until the primary questions are decided; ask one in questions"
            )
        check_once("evaluation.tasks", tasks)
        _check_methods(self)
        if self.tuning is not None:
            check_tuning(self.tuning, training, data, trained)
            self.check_trials()
        check_retention(self.retention, self.model.name, data, tasks)
        check_questions(self, tasks, list(self.retention.sources(self.model.name)) if self.retention else ())

        # Scales of patches
        for scale in self.rewind:
            if not math.isfinite(scale) or scale <= 0 or scale == 1:
                raise ValueError(
                    f"rewind lists {scale:g}; list positive numbers beside 1, such as 0.5 (0 is the base, 1 the method)"
                )
        check_once("rewind", self.rewind)
        for key, value, why in (
            ("tuning", self.tuning, "whose text chooses among the scales"),
            ("retention", self.retention, "on whose text each scale is measured"),
            ("data.held_out", data.held_out, "on which each scale is measured"),
        ):
            if self.rewind and not value:
                raise ValueError(f"rewind needs {key}, {why}; set it, or leave rewind out")
        return self

    @property
    def trained(self) -> list[str]:
        """The methods that are trained: all but the baseline."""
        return [name for name in self.methods if name != self.baseline]

    @property
    def tuning_seed(self) -> int:
        """The seed of all trials of tuning, which no final run uses."""
        return tuning_seed(self.training.all_seeds)

    @property
    def margins(self) -> dict[str, float]:
        """The margin of each measure and task that has one: those of the recipe, else the defaults."""
        return margins_of(self)

    def tuning_of(self, method: str) -> TuningSettings | None:
        """Return the trials of a method; None where nothing is tuned."""
        return self.tuning

    def tuned_at(self, method: str) -> str:
        """Return the method whose trials choose a method's rate: itself, or its middle budget, the lower one of two."""
        if self.tuning is None or self.tuning.at == "every" or family_of(method) == method:
            return method
        points = points_of(family_of(method), self.methods)
        return points[(len(points) - 1) // 2] if points else method

    def only(self, methods: Collection[str]) -> Recipe:
        """Return the recipe with some of its methods, and the baseline; ``lora`` is every budget of it.

        Raises:
            HfpatchError: if there is no such method, none is named, or one needs the size or rate of a method that is
                left out.
        """
        methods = [point for name in methods for point in (points_of(name, self.methods) or [name])]
        choices = f"; there are {', '.join(self.trained)}"
        if not methods:
            raise HfpatchError(f"--methods names no method of {self.name}{choices}")
        for name in methods:
            if name not in self.methods:
                hint = nearest(name, self.methods) or choices
                raise HfpatchError(f"--methods: no method {name!r} in {self.name}{hint}")
        kept = {name: parts for name, parts in self.methods.items() if name in {self.baseline, *methods}}
        for name, parts in kept.items():
            matched = [part["match"] for part in parts if "match" in part and not is_budget(part["match"])]
            if missing := next((other for other in matched if other not in kept), None):
                raise HfpatchError(f"--methods: {name} has the size of {missing} (match), which is left out; add it")
            if (other := self.tuned_at(name)) not in kept:
                raise HfpatchError(f"--methods: {name} has the rate of {other} (tuning.at), which is left out; add it")
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

    def tuned(self, method: str, values: Values) -> Recipe:
        """Return the recipe without tuning, at the values that a trial of one method had."""
        return self._tuned(method, values, {})

    def trial(self, method: str, values: Values) -> Recipe:
        """Return the recipe of one trial of tuning.

        Raises:
            ValueError: if the recipe has no tuning, or the trial's values contradict each other.
        """
        if self.tuning is None:
            raise ValueError(f"{self.name} has no tuning")
        return self._tuned(method, values, trial_changes(self.training, self.tuning))

    def _tuned(self, method: str, values: Values, changes: Mapping[str, Any]) -> Recipe:
        """Return the recipe without tuning, at the values of a trial and with other changes of ``training``."""
        training, parts = dict[str, Any](changes), list(self.methods[method])
        for key, value in values.items():
            first, _, rest = key.partition(".")
            if first.isdigit():
                parts[int(first)] = {**parts[int(first)], rest: value}
            elif rest:  # of a group of tensors
                training[first] = {**training.get(first, getattr(self.training, first)), rest: value}
            else:
                training[key] = value
        if training.get("schedule", self.training.schedule) != "wsd" and self.tuning is not None:
            training["decay_steps"] = None  # which are those of the grid's other schedules
        methods = {**self.methods, method: parts}
        return self.replaced({"training": training, "methods": methods, "tuning": None, "rewind": ()})

    def check_trials(self) -> None:
        """Refuse mistakes in trials of tuning, and in final runs at their values.

        Raises:
            HfpatchError: naming the first.
        """
        trained = {name: self.methods[name] for name in self.trained}
        runs = [(name, values) for name in trained if self.tuning for values in self.tuning.combinations(name, trained)]
        for where, recipe_of in (("tuning.grid: ", self.tuned), ("tuning, in a trial: ", self.trial)):
            for name, values in runs:
                try:
                    recipe_of(name, values)
                except ValidationError as error:
                    raise HfpatchError(f"{where}{explain(error, Recipe)}") from None


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
    return recipe


def refuse_rate(overrides: Sequence[str], *, is_tuned: bool) -> None:
    """Refuse an override of the learning rate where tuning chooses all rates."""
    for override in overrides if is_tuned else ():
        if read_override(override)[0] == "training.lr":
            raise HfpatchError(
                f"override {override!r}: this recipe tunes the rate, so it has no effect; set "
                "tuning.learning_rates, or add tuning=null"
            )


def _rearranged(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with the budgets as methods, and the label in a method's first part in ``labels``."""
    if "architecture" in values:
        raise ValueError("has an architecture to train from scratch; use hfpatch pretrain")
    methods, given = values.get("methods"), values.get("labels", {})
    if not isinstance(methods, dict) or not isinstance(given, dict):
        return with_points(values)
    labels, bare = {}, dict(methods)
    for name, parts in methods.items():
        if isinstance(parts, list) and parts and isinstance(parts[0], dict) and "label" in parts[0]:
            labels[name] = parts[0]["label"]
            bare[name] = [{key: value for key, value in parts[0].items() if key != "label"}, *parts[1:]]
    return with_points({**values, "methods": bare, "labels": {**labels, **given}} if labels else values)


def _check_methods(recipe: Recipe) -> None:
    baseline, methods = recipe.baseline, recipe.methods
    check_names(recipe.name, *map(family_of, methods))
    for name, parts in methods.items():
        if name != family_of(name) and name != f"{family_of(name)}@{budget_of(parts)}":
            raise HfpatchError(f"the name {name!r}: what follows @ is the budget in match, as @10k is of match: 10000")
    if baseline not in methods:
        hint = nearest(baseline, methods) or f"; add '{baseline}: []'"
        raise HfpatchError(f"baseline is {baseline!r}, which is not among methods{hint}")
    if methods[baseline]:
        raise HfpatchError(f"methods.{baseline} is the baseline and must be [], the unchanged model")
    for name, parts in methods.items():
        if not parts and name != baseline:
            raise HfpatchError(
                f"methods.{name} has no part, which makes it a second baseline; give it one or remove it"
            )
        for index, part in enumerate(parts):
            where = f"methods.{name}.{index}"
            if "type" not in part:
                kinds = "pre_projection, lora, another method of hfpatch or PEFT, or module:Class"
                raise HfpatchError(f"{where} has no type; write type: {kinds}")
            check_match(where, name, part, methods)

    # Labels
    seen = {name: name for name in methods if name not in recipe.labels}
    for name, label in recipe.labels.items():
        if name not in methods:
            raise HfpatchError(f"labels.{name} is of no method{nearest(name, methods)}")
        if not label.strip() or not label.isprintable() or len(label) > _LONGEST_LABEL:
            raise HfpatchError(f"labels.{name} is {label!r}; must be a line of 1 to {_LONGEST_LABEL} characters")
        if label in seen:
            raise HfpatchError(
                f"labels.{name} is {label!r}, which {seen[label]} is called too; give each method its own"
            )
        seen[label] = name


def check_names(*names: str) -> None:
    """Refuse names that cannot name a folder."""
    if wrong := [name for name in names if not _FILE_NAME.fullmatch(name)]:
        raise HfpatchError(f"the name {wrong[0]!r} becomes a folder; use letters, digits, '_', '-' and '.' only")


def check_match(
    where: str, name: str, part: Mapping[str, Any], methods: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Refuse a mistake in ``match`` in a part of the method ``name``; ``where`` is the part."""
    if "match" not in part:
        return
    target, others = part["match"], [other for other, parts in methods.items() if parts and other != name]
    kind = part["type"]
    if kind in NO_SIZE:
        raise HfpatchError(f"{where}.match: {kind} has no size to solve for: it {NO_SIZE[kind]}; leave match out")
    if kind in SIZES and SIZES[kind].key in part:  # other types cannot be injected and are refused for that
        raise HfpatchError(f"{where} has both {SIZES[kind].key} and match; match finds {SIZES[kind].key}")
    if is_budget(target):
        return
    if target not in methods:
        raise HfpatchError(
            f"{where}.match is {target!r}, which is not among methods{nearest(str(target), others)}, nor a number of "
            "parameters, nor a share of the base's such as 0.1%"
        )
    if target not in others:
        raise HfpatchError(f"{where}.match is {target!r}; a method can match neither itself nor the baseline")
    if any("match" in other for other in methods[target]):
        raise HfpatchError(f"{where}.match is {target!r}, which matches another method itself; match that one")
