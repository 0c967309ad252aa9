"""Exact parameter counts without injecting anything into the model, and the sizes that match a count."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hfpatch.errors import HfpatchError, whole_number
from hfpatch.recipes.budgets import TOLERANCE
from hfpatch.recipes.sizes import NO_SIZE, SIZES, Part, Size, Widths, share_of
from hfpatch.sites import (
    base_model,
    count_values,
    features,
    find_sites,
    require_matrix,
    select_sites,
    survey,
    unwrapped,
)
from hfpatch.surgery.patch import patch, patch_summary, unpatch
from hfpatch.tuners.adapters import adapter_parameters, base_parameters, has_adapters, stack
from hfpatch.tuners.checks import require_injectable
from hfpatch.tuners.config import MethodConfig, method_name
from hfpatch.tuners.layer import layers_by_site
from hfpatch.tuners.naming import chosen_modules

_MOST = 100
"""How many times the base's parameters a method may be sized to: PEFT allocates what is only to be counted."""
Count = Callable[[Any], int]
Config = TypeVar("Config", bound=PeftConfig)


def count_added(model: nn.Module, configs: Sequence[PeftConfig]) -> int:
    """Return how many parameters the configurations would add to the model, counted exactly in a twin of it."""
    return int(Trial(model)(configs, look=_added)) if configs else 0


def _added(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in adapter_parameters(model).values())


class Trial:
    """Tries configurations on a twin of a model, so that the model stays as it is.

    The twin is on the meta device. For the few tuners whose tensors depend on the values of the weights (ShiRA,
    AdaMSS) it is a copy of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, base = model, base_model(model)
        with torch.device("meta"):
            self.twin: nn.Module = type(base)(copy.deepcopy(base.config))

    def __call__(self, configs: Sequence[PeftConfig], *, look: Callable[[nn.Module], Any] = patch_summary) -> Any:
        """Return ``look(twin)`` of the patched twin: by default its parameter counts; errors are those of `patch`."""
        try:
            patch(self.twin, list(configs))
        except HfpatchError as error:
            on_meta = all(parameter.is_meta for parameter in self.twin.parameters())
            if not isinstance(error.__cause__, NotImplementedError) or not on_meta:
                raise
            if all(parameter.is_meta for parameter in self.model.parameters()):
                raise HfpatchError(
                    f"{' and '.join(map(method_name, configs))} needs the values of the base's weights, and there are "
                    "none on the meta device; load the model's weights"
                ) from error
            copied: nn.Module = copy.deepcopy(base_model(self.model))
            self.twin = unpatch(copied) if has_adapters(copied) else copied
            return self(configs, look=look)
        try:
            return look(self.twin)
        finally:
            unpatch(self.twin)


def attention_modules(
    model: nn.Module, *, layers: int | Sequence[int] | None = None, pattern: str | Sequence[str] | None = None
) -> list[str]:
    """Return the full paths of the QKV projection(s) and the output projection, for LoRA's ``target_modules``.

    Args:
        model: the base.
        layers: index or indices of the layers, as in ``layers_to_transform``; None takes all.
        pattern: name or names of the lists of layers, as in PEFT's ``layers_pattern``; None takes all.

    Raises:
        HfpatchError: if a layer does not exist or has no attention, or no list has that name.
    """
    sites = find_sites(model) if layers is None else select_sites(survey(model), layers)
    paths = [path for site in sites for path in site.linear_paths]
    if pattern:
        lists = "|".join(re.escape(name) for name in ([pattern] if isinstance(pattern, str) else pattern))
        paths = [path for path in paths if re.search(rf"(^|\.)({lists})\.\d+\.", path)]
        if not paths:
            raise HfpatchError(f"layers_pattern={pattern!r}: no layer of this model is in a list with that name")
    return paths


def match_lora_rank(model: nn.Module, *, budget: int, target_modules: Sequence[str]) -> int:
    """Return the LoRA rank whose parameter count is nearest to a budget; the smaller one of two equally near.

    A module of widths (n, m) costs r·(n + m) parameters, so the count is r times one number.

    Args:
        model: the base.
        budget: the parameter count to match.
        target_modules: names of modules, matched as PEFT does: a full path or its last parts. For ``"all-linear"`` and
            regular expressions there is `sized`.

    Raises:
        HfpatchError: if the budget is not a positive whole number, no module matches, or one that does is not a linear
            projection.
    """
    budget = whole_number("budget", budget, at_least=1)
    target_modules = [target_modules] if isinstance(target_modules, str) else target_modules
    suffixes = tuple(f".{name}" for name in target_modules)
    per_rank = 0
    for name, module in base_model(model).named_modules():
        if name in target_modules or name.endswith(suffixes):
            require_matrix(module, name)
            per_rank += sum(features(unwrapped(module)))
    if not per_rank:
        raise HfpatchError(f"target_modules={list(target_modules)}: no module of this model has that name")
    below = budget // per_rank
    return max(1, below if budget - below * per_rank <= (below + 1) * per_rank - budget else below + 1)


def sized(config: Config, model: nn.Module, *, parameters: int | str | PeftConfig | Sequence[PeftConfig]) -> Config:
    """Return a configuration with the size whose parameter count on a model is nearest to a given one.

    The size is the option that ``match`` in recipes solves for: ``expansion`` of a pre-projection, ``rank``, LoRA's
    ``r``, ... All other options stay, LoRA's ``lora_alpha`` too.

    Args:
        config: the configuration, of hfpatch or PEFT; it is not changed.
        model: the base; it is not changed.
        parameters: the number of parameters; a share of the base's, such as ``"1%"``; or the configuration or stack
            whose number it is, such as ``LoraConfig(r=32)``.

    Raises:
        HfpatchError: if the method has no size, the number is not positive, or the method does not go into the model.
    """
    if not isinstance(config, PeftConfig):
        raise HfpatchError(f"sized takes one PEFT configuration, not {config!r:.60}")
    kind = method_name(config)
    require_injectable(config)
    if kind not in SIZES:
        raise HfpatchError(f"{kind} has no size to solve for: it {NO_SIZE.get(kind, 'is new to hfpatch')}")
    size, copied = SIZES[kind], copy.deepcopy(config)
    if isinstance(copied, MethodConfig):
        copied.target_modules = chosen_modules(config)
    options = {field.name: getattr(copied, field.name) for field in dataclasses.fields(copied)}

    def build(value: Any) -> Config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dataclasses.replace(copy.deepcopy(copied), **{size.key: value})

    budget = parameter_count(model, parameters)
    value, count = match_size(model, size, options, build, budget=budget)
    if abs(count - budget) > TOLERANCE * budget:
        warnings.warn(f"{kind}: {count:,} parameters, at {size.key}={value}, are nearest to {budget:,}", stacklevel=2)
    return build(value)


def parameter_count(model: nn.Module, parameters: int | str | PeftConfig | Sequence[PeftConfig]) -> int:
    """Return ``parameters``, as `sized` takes it, as a positive count.

    Raises:
        HfpatchError: if it is none, or far more than the base has.
    """
    if isinstance(parameters, PeftConfig | list | tuple):
        return count_added(model, [parameters] if isinstance(parameters, PeftConfig) else parameters)
    base = sum(map(count_values, base_parameters(model).values()))
    if isinstance(parameters, str):
        share = share_of(parameters)
        if share is None:
            raise HfpatchError(f"parameters={parameters!r} must be a share of the base's above 0, such as '1%'")
        count = max(1, round(share / 100 * base))
    else:
        count = whole_number("parameters", parameters, at_least=1)
    if count > _MOST * base:
        raise HfpatchError(f"{count:,} parameters are more than {_MOST} times the base's {base:,}; ask for fewer")
    return count


def match_size(
    model: nn.Module, size: Size, part: Part, build: Callable[[Any], PeftConfig], *, budget: int
) -> tuple[Any, int]:
    """Return the size whose parameter count is nearest to ``budget``, and that count; the smaller of two equally near.

    Every count is that of the part injected into a twin of the model, so it holds for all options of the part.

    Args:
        model: the base.
        size: the tuner's size.
        part: its options.
        build: makes the part's configuration with a size.
        budget: the count to match.

    Raises:
        HfpatchError: if the part cannot be injected, or its size does not change its count.
    """
    trial, counted = Trial(model), dict[Any, int]()

    def count(value: Any) -> int:
        if value not in counted:
            counted[value] = trial([build(value)], look=_added)
        return counted[value]

    smallest = size.smallest(part)
    widths, counted[smallest] = trial([build(smallest)], look=lambda m: (adapted_widths(m), _added(m)))
    sizes = [value for run in size.runs(part, widths) if run for value in nearest_sizes(run, count, budget)]
    fitting = [value for value in sizes if count(value)]
    if not fitting:
        raise HfpatchError(f"no {size.key} fits the modules that it adapts; name others in target_modules")
    value = min(fitting, key=lambda candidate: (abs(count(candidate) - budget), count(candidate)))
    return value, count(value)


def adapted_widths(model: nn.Module) -> Widths:
    """Return the widths of the modules that PEFT adapts; of the attention's hidden state for hfpatch's methods."""
    if all(isinstance(config, MethodConfig) for config in stack(model).values()):
        return [(site.hidden_size, site.hidden_size) for site, _ in layers_by_site(model)]
    bases = (unwrapped(module) for module in model.modules() if isinstance(module, BaseTunerLayer))
    return [features(base) for base in bases if any(hasattr(base, name) for name in ("in_features", "nx"))]


def nearest_sizes(run: Sequence[Any], count: Count, budget: int) -> list[Any]:
    """Return the sizes of a run on both sides of the budget; at an end of the run, that end.

    The counts of a run do not fall, and grow about in proportion to the size: the search interpolates, and bisects
    every other time.

    Raises:
        HfpatchError: if a run without an end has a count that does not rise.
    """
    low = high = 0
    while (reached := count(run[high])) < budget and high < len(run) - 1:
        if high > low and reached == count(run[low]) and len(run) > 10**9:
            raise HfpatchError("no size changes the number of parameters with these options")
        low, high = high, min(len(run) - 1, max(high + 1, -(-(high + 1) * budget // max(reached, 1)) - 1))
    bisect = False
    while high - low > 1 and count(run[low]) < budget < count(run[high]):
        below, above = count(run[low]), count(run[high])
        guess = low + (high - low) // 2 if bisect else low + (high - low) * (budget - below) // (above - below)
        middle = min(max(guess, low + 1), high - 1)
        low, high = (middle, high) if count(run[middle]) < budget else (low, middle)
        bisect = not bisect
    return [run[low], run[high]]
