"""Build a stack of PEFT configurations from a method of a recipe, which is a list of parts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftConfig
from torch import nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.comparison import match_mistake
from hfpatch.surgery.budget import attention_modules, count_added, lora_parameters_per_rank, match_lora_rank
from hfpatch.tuners.checks import require_injectable, targeted_modules
from hfpatch.tuners.config import SurgeryConfig

Part = Mapping[str, Any]
Methods = Mapping[str, Sequence[Part]]

LORA = "lora"
ATTENTION = "attention"
_INTERNAL_KEYS = {"peft_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"}


@dataclass(frozen=True)
class Match:
    """How near a LoRA's parameter count is to that of the method that it is matched to.

    Args:
        to: name of that method.
        rank: the rank that was solved for.
        parameters: the LoRA's own count.
        target_parameters: the other method's count.
    """

    to: str
    rank: int
    parameters: int
    target_parameters: int

    @property
    def difference(self) -> float:
        """The relative difference of the two counts."""
        return self.parameters / self.target_parameters - 1

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the difference as a JSON object."""
        return {**dataclasses.asdict(self), "difference": self.difference}


@dataclass(frozen=True)
class Method:
    """A method ready to be injected: ``patch(model, method.configs)``; no configuration means the base itself."""

    name: str
    configs: list[PeftConfig]
    match: Match | None = None


def validate_methods(methods: Methods) -> None:
    """Check every part of every method, without a model.

    Raises:
        HfpatchError: naming the method, the part, the key and the nearest known one.
    """
    for name, parts in methods.items():
        for number, part in enumerate(parts):
            where = f"methods.{name}[{number}]"
            _check_keys(where, part, methods, name)
            _config(where, {**part, "r": part.get("r", 1)} if "match" in part else part, target_modules=["any"])


def build_method(model: nn.Module, methods: Methods, name: str) -> Method:
    """Return the configurations of one method for a model.

    ``target_modules: attention`` (the default for LoRA) means the QKV projection(s) and the output projection;
    ``match: NAME`` solves for the rank whose trainable count is nearest to that of another method. LoRA defaults to
    alpha = 2r and no dropout, as in the published comparison.

    Raises:
        HfpatchError: if the method or one of its parts is not valid.
    """
    if name not in methods:
        raise HfpatchError(f"method {name!r} is not in the recipe{nearest(name, methods)}; it has {', '.join(methods)}")
    validate_methods({name: methods[name]} | {n: p for n, p in methods.items() if n != name})
    configs: list[PeftConfig] = []
    match = None
    for number, part in enumerate(methods[name]):
        where, fields, targets = f"methods.{name}[{number}]", dict(part), None
        if fields["type"] == LORA:
            targets = fields.get("target_modules", ATTENTION)
            if targets == ATTENTION:  # full names, so that the layers need no other option
                layers, pattern = fields.pop("layers_to_transform", None), fields.pop("layers_pattern", None)
                targets = attention_modules(model, layers=layers, pattern=pattern)
        if "match" in fields:
            other = str(fields["match"])
            target_parameters = count_added(model, build_method(model, methods, other).configs)
            trained = targeted_modules(model, _config(where, {**fields, "r": 1}, target_modules=targets))
            rank = match_lora_rank(model, budget=target_parameters, target_modules=trained)
            match = Match(other, rank, rank * lora_parameters_per_rank(model, trained), target_parameters)
            fields["r"] = rank
        configs.append(_config(where, fields, target_modules=targets))
    return Method(name=name, configs=configs, match=match)


def method_types() -> list[str]:
    """Return the part types that a recipe may name: hfpatch's methods and PEFT's, in lower case."""
    return sorted(str(kind.value).lower() for kind in PEFT_TYPE_TO_CONFIG_MAPPING)


def _check_keys(where: str, part: Part, methods: Methods, name: str) -> None:
    if not isinstance(part, Mapping) or "type" not in part:
        raise HfpatchError(
            f"{where}: a part is a mapping with a 'type', such as {{type: pre_projection}}; got {part!r}"
        )
    kind = part["type"]
    if kind not in method_types():
        raise HfpatchError(f"{where}.type: {kind!r} is no method{nearest(str(kind), method_types())}")
    cls = _config_class(kind)
    internal = _INTERNAL_KEYS | ({"target_modules"} if issubclass(cls, SurgeryConfig) else set())
    options = [field.name for field in dataclasses.fields(cls) if field.name not in internal]
    known = [*options, "type", *(["match"] if kind == LORA else [])]
    for key in part:
        if key not in known:
            raise HfpatchError(f"{where}: {kind} has no option {key!r}{nearest(str(key), known)}")
    if mistake := match_mistake(name, part, methods):
        raise HfpatchError(where + mistake)


def _config(where: str, part: Part, *, target_modules: str | Sequence[str] | None) -> PeftConfig:
    kind = str(part["type"])
    fields = {key: value for key, value in part.items() if key not in ("type", "match")}
    try:
        if kind == LORA:
            targets = target_modules or []
            fields["target_modules"] = [targets] if isinstance(targets, str) else list(targets)
            fields.setdefault("lora_alpha", 2 * int(fields.get("r", 8)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config: PeftConfig = _config_class(kind)(**fields)
        require_injectable(config)
    except (ValueError, TypeError) as error:
        raise HfpatchError(f"{where}: {' '.join(str(error).split())}") from error
    if kind == LORA and (not isinstance(config.r, int) or config.r < 1):
        raise HfpatchError(f"{where}: r={config.r} must be a whole number of at least 1")
    return config


def _config_class(kind: str) -> Any:
    return next(config for key, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if str(key.value).lower() == kind)
