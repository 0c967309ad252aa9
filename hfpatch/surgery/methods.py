"""Build a stack of PEFT configurations from a method of a recipe, which is a list of parts."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PeftConfig
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.budgets import budget_text, is_budget
from hfpatch.recipes.code import REFERENCE
from hfpatch.recipes.methods import check_match
from hfpatch.recipes.sizes import SIZES
from hfpatch.recipes.strict import NO_OWN_RATE, RATES
from hfpatch.sites import base_model, select_sites, survey
from hfpatch.support import plugins
from hfpatch.surgery.budget import attention_modules, count_added, match_size, parameter_count
from hfpatch.tuners.checks import require_injectable
from hfpatch.tuners.config import MethodConfig, option_types, python_value
from hfpatch.tuners.options import fitting
from hfpatch.tuners.registration import require_loaded, require_method

Part = Mapping[str, Any]
Methods = Mapping[str, Sequence[Part]]

LORA = "lora"
ATTENTION = "attention"
SHORTHANDS = (ATTENTION, "mlp", "all-linear")
_INTERNAL_KEYS = {"peft_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"}


@dataclass(frozen=True)
class Match:
    """A part's size solved for the parameter count of another method, or of its method for a budget.

    Args:
        to: the other method's name, or the budget as in names.
        size: the option that was solved for, such as LoRA's ``r``.
        value: its value.
        parameters: the part's own count; with a budget the method's.
        target_parameters: the other method's count, or the budget.
    """

    to: str
    size: str
    value: Any
    parameters: int
    target_parameters: int

    @property
    def difference(self) -> float:
        """The relative difference of the two counts."""
        return self.parameters / self.target_parameters - 1

    def to_json(self) -> dict[str, Any]:
        """Return the counts, their relative difference, and the rank, or the size and its value, as a JSON object."""
        is_rank = self.size in ("r", "rank")
        size = {"rank": int(self.value)} if is_rank else {"size": self.size, "value": self.value}
        counts = {"parameters": self.parameters, "target_parameters": self.target_parameters}
        return {"to": self.to, **size, **counts, "difference": self.difference}


@dataclass(frozen=True)
class Method:
    """A method ready to be injected: ``patch(model, method.configs)``; no configuration means the base itself."""

    name: str
    configs: list[PeftConfig]
    match: Match | None = None

    @property
    def classes(self) -> list[type]:
        """The classes of its computation: of its configurations, and PEFT's tuners for them."""
        tuners = [PEFT_TYPE_TO_TUNER_MAPPING.get(cast("Any", config.peft_type)) for config in self.configs]
        return [*map(type, self.configs), *filter(None, tuners)]

    @property
    def merges(self) -> bool | None:
        """Whether it can be merged into the base's weights: every part is linear; None for the base itself."""

        def can(config: PeftConfig) -> bool:
            if isinstance(config, MethodConfig):
                return config.unmergeable() is None
            tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(cast("Any", config.peft_type))
            return isinstance(tuner, type) and issubclass(tuner, BaseTuner)

        return all(map(can, self.configs)) if self.configs else None


def validate_methods(methods: Methods, only: Collection[str] | None = None) -> None:
    """Check every part of every method, without a model.

    Args:
        methods: the methods.
        only: the names of those to check; None for all.

    Raises:
        HfpatchError: naming the method, the part, the key and the nearest known one.
    """
    for name in methods if only is None else only:
        for number, part in enumerate(methods[name]):
            where = f"methods.{name}[{number}]"
            part = _known(where, part)
            cls = method_classes()[part["type"]]
            internal = _INTERNAL_KEYS | ({"target_modules"} if issubclass(cls, MethodConfig) else set())
            options = [field.name for field in dataclasses.fields(cls) if field.name not in internal]
            keys = [*options, "type", "match"]
            for key in part:
                if key not in keys:
                    hint = NO_OWN_RATE if key in RATES else nearest(str(key), keys)
                    raise HfpatchError(f"{where}: {part['type']} has no option {key!r}{hint}")
            check_match(where, name, part, methods)
            if "match" in part and part["type"] in SIZES:
                part = _sized(part, SIZES[part["type"]].smallest(part))
            if part.get("target_modules", ATTENTION if part["type"] == LORA else None) in SHORTHANDS:
                part = {**part, "target_modules": ["any"]}
            _config(where, part)


def build_method(model: nn.Module, methods: Methods, name: str) -> Method:
    """Return the configurations of one method for a model.

    ``target_modules`` may be ``attention`` (the default for LoRA), ``mlp`` or ``all-linear``, see :func:`target_names`.
    ``match: NAME`` solves for the part's size (see `hfpatch.recipes.sizes`) whose count is nearest to that of another
    method. ``match: 10_000`` or ``match: 0.1%`` solves for the size with which the count of the whole method is nearest
    to a number or to a share of the base's. LoRA defaults to alpha = 2r and no dropout, as in the published comparison.

    Raises:
        HfpatchError: if the method or one of its parts is not valid.
    """
    if name not in methods:
        raise HfpatchError(f"method {name!r} is not in the recipe{nearest(name, methods)}; it has {', '.join(methods)}")
    validate_methods(methods, [name])
    configs: list[PeftConfig] = []
    match = None
    for number, part in enumerate(methods[name]):
        where = f"methods.{name}[{number}]"
        fields = dict(_known(where, part))
        if fields["type"] == LORA:
            fields.setdefault("target_modules", ATTENTION)
        if (shorthand := fields.get("target_modules")) in SHORTHANDS:  # full names, of the layers alone
            layers, pattern = fields.pop("layers_to_transform", None), fields.pop("layers_pattern", None)
            fields["target_modules"] = target_names(model, shorthand, layers=layers, pattern=pattern)
        if "match" in fields:
            target, other, size, rest = fields["match"], str(fields["match"]), SIZES[fields["type"]], 0
            if is_budget(target):
                others = [part for index, part in enumerate(methods[name]) if index != number]
                rest = count_added(model, build_method(model, {name: others}, name).configs)
                other = budget_text(target)
            else:
                target = build_method(model, methods, other).configs

            def build(value: Any, where: str = where, fields: Part = fields) -> PeftConfig:
                return _config(where, _sized(fields, value))

            try:
                budget = parameter_count(model, target)
                value, count = match_size(model, size, fields, build, budget=budget - rest)
            except HfpatchError as error:
                raise HfpatchError(f"{where}.match: {error}") from error
            match = Match(other, size.key, value, count + rest, budget)
            fields = _sized(fields, value)
        configs.append(_config(where, fields))
    return Method(name=name, configs=configs, match=match)


def target_names(
    model: nn.Module,
    shorthand: str,
    *,
    layers: int | Sequence[int] | None = None,
    pattern: str | Sequence[str] | None = None,
) -> list[str]:
    """Return the full names of the modules of a shorthand.

    ``attention``: the QKV projection(s) and the output projection; ``mlp``: the other linear projections of the blocks,
    without fused experts; ``all-linear``: every linear projection but the head, as in PEFT.

    Args:
        model: the base.
        shorthand: one of :data:`SHORTHANDS`.
        layers: as in :func:`hfpatch.attention_modules`.
        pattern: as in :func:`hfpatch.attention_modules`.

    Raises:
        HfpatchError: if there are none, or a layer does not exist.
    """
    if shorthand == ATTENTION:
        return attention_modules(model, layers=layers, pattern=pattern)
    if pattern is not None:
        raise HfpatchError(f"layers_pattern does not go with target_modules={shorthand}; leave it out")
    base: Any = base_model(model)
    head = base.get_output_embeddings()
    linear = [(name, module) for name, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    names = [name for name, module in linear if module is not head]
    if shorthand == "mlp" or layers is not None:
        surveyed = survey(model)
        sites = [] if layers is None else select_sites(surveyed, layers)
        blocks = surveyed.blocks if layers is None else [surveyed.blocks[index] for index in {s.layer for s in sites}]
        names = [name for name in names if any(name.startswith(f"{block}.") for block in blocks)]
        if shorthand == "mlp":
            # Blocks without attention may have another mixer there: of these, only modules whose names are also beside
            # the attention of other blocks
            outputs = {path for site in surveyed.sites for path in site.linear_paths}
            mixers = tuple(f"{site.path}." for site in surveyed.sites)
            skipped = [f"{surveyed.blocks[index]}." for index in surveyed.skipped]
            beside = {n for n in names if n not in outputs and not n.startswith((*mixers, *skipped))}
            parts = {n[len(block) + 1 :].split(".")[0] for block in blocks for n in beside if n.startswith(f"{block}.")}
            also = tuple(f"{block}{part}." for block in skipped for part in parts)
            names = [n for n in names if n in beside or f"{n}.".startswith(also)]
    if not names:
        raise HfpatchError(f"target_modules={shorthand}: this model has no such linear projection; name its modules")
    return names


def _sized(part: Part, value: Any) -> dict[str, Any]:
    """Return a part with a size instead of ``match``."""
    return {**{key: item for key, item in part.items() if key != "match"}, SIZES[part["type"]].key: value}


def method_classes() -> dict[str, Any]:
    """Return the configuration class by part type, in lower case, of hfpatch's methods and PEFT's."""
    classes = {str(kind.value).lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return dict(sorted(classes.items()))


def _known(where: str, part: Part) -> Part:
    """Return a part whose type is one of :func:`method_classes`; ``package.module:Class`` is imported."""
    if not isinstance(part, Mapping) or "type" not in part:
        raise HfpatchError(
            f"{where}: a part is a mapping with a 'type', such as {{type: pre_projection}}; got {part!r}"
        )
    kind = part["type"]
    try:
        if isinstance(kind, str) and REFERENCE.fullmatch(kind):
            return {**part, "type": require_method(plugins.named_object(kind), kind).spec.name}
        require_loaded(str(kind))
    except HfpatchError as error:
        raise HfpatchError(f"{where}.type: {error}") from error
    if str(kind) not in method_classes():
        raise HfpatchError(
            f"{where}.type: {kind!r} is not a method{nearest(str(kind), method_classes())}; one of your own is named "
            "package.module:Class"
        )
    return part


def _config(where: str, part: Part) -> PeftConfig:
    kind = str(part["type"])
    cls = method_classes()[kind]
    fields = {key: python_value(value) for key, value in part.items() if key not in ("type", "match")}
    try:
        if not issubclass(cls, MethodConfig):
            _check_types(cls, fields)
        if kind == LORA:
            targets = fields.get("target_modules") or []
            if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets):  # a name, which PEFT takes for a pattern
                fields["target_modules"] = [targets]
            fields.setdefault("lora_alpha", 2 * int(fields.get("r", 8)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config: PeftConfig = cls(**fields)
        require_injectable(config)
    except (ValueError, TypeError) as error:
        raise HfpatchError(f"{where}: {' '.join(str(error).split())}") from error
    if kind == LORA and config.r < 1:
        raise HfpatchError(f"{where}: r={config.r} must be a whole number of at least 1")
    return config


def _check_types(cls: type[PeftConfig], values: Mapping[str, Any]) -> None:
    """Check the types of PEFT's options, as PEFT takes "false" for True.

    It declares scales as whole numbers, which they need not be, and not every initialisation of LoRA, which it checks.
    """
    try:
        types = option_types(cls)
    except NameError:  # another PEFT may import some of them for type checkers alone
        return
    for name, hint in types.items():
        value = values.get(name)
        is_default = value is None and getattr(cls, name, None) is None
        if name not in values or is_default or any(map(dataclasses.is_dataclass, (value, hint))):
            continue
        if name.endswith(("alpha", "lambda")):
            hint |= float
        elif name == "init_lora_weights":
            hint |= str
        fitting(name, value, hint)
