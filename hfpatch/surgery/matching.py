"""The size of a tuner at which its parameter count is nearest to a given one."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hfpatch.errors import HfpatchError, whole_number
from hfpatch.recipes.budgets import TOLERANCE
from hfpatch.recipes.sizes import NO_SIZE, SIZES, Part, Size, Widths, share_of
from hfpatch.sites import count_values, features, find_sites, unwrapped
from hfpatch.surgery.budget import Trial, count_added
from hfpatch.tuners.adapters import base_parameters, stack
from hfpatch.tuners.config import MethodConfig, method_name
from hfpatch.tuners.naming import chosen_modules

Count = Callable[[Any], int]
Config = TypeVar("Config", bound=PeftConfig)


def sized(config: Config, model: nn.Module, *, parameters: int | str | PeftConfig | Sequence[PeftConfig]) -> Config:
    """Return a configuration with the size whose parameter count on a model is nearest to a given one.

    The size is what ``match`` in recipes solves for: ``expansion`` of a pre-projection, ``rank``, LoRA's ``r``, ... All
    other options stay, LoRA's ``lora_alpha`` too. Nothing is injected into the model.

    Args:
        config: the configuration, of hfpatch or PEFT; it is not changed.
        model: the base.
        parameters: the number of parameters; a share of the base's, such as ``"1%"``; or the configuration or stack
            whose number it is, such as ``LoraConfig(r=32)``.

    Raises:
        HfpatchError: if the method has no size, the number is not positive, or the method does not go into the model.
    """
    kind = method_name(config)
    if kind not in SIZES:
        raise HfpatchError(f"{kind} has no size to solve for: it {NO_SIZE.get(kind, 'cannot be injected')}")
    size, given = SIZES[kind], copy.deepcopy(config)
    if isinstance(given, MethodConfig):
        given.target_modules = chosen_modules(config)
    options = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}

    def build(value: Any) -> Config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dataclasses.replace(copy.deepcopy(given), **{size.key: value})

    budget = parameter_count(model, parameters)
    value, count = match_size(model, size, options, build, budget=budget)
    if abs(count - budget) > TOLERANCE * budget:
        warnings.warn(f"{kind}: {count:,} parameters, at {size.key}={value}, are nearest to {budget:,}", stacklevel=2)
    return build(value)


def parameter_count(model: nn.Module, parameters: int | str | PeftConfig | Sequence[PeftConfig]) -> int:
    """Return a number of parameters as `sized` takes it as a count.

    Raises:
        HfpatchError: if it is not positive.
    """
    if isinstance(parameters, str):
        share = share_of(parameters)
        if share is None:
            raise HfpatchError(f"parameters={parameters!r} must be a share of the base's above 0, such as '1%'")
        return max(1, round(share / 100 * sum(map(count_values, base_parameters(model).values()))))
    if isinstance(parameters, PeftConfig):
        return count_added(model, [parameters])
    if isinstance(parameters, list | tuple):
        return count_added(model, parameters)
    return whole_number("parameters", parameters, at_least=1)


def match_size(
    model: nn.Module, size: Size, part: Part, build: Callable[[Any], PeftConfig], *, budget: int
) -> tuple[Any, int]:
    """Return the size whose parameter count is nearest to ``budget``, and that count.

    Every count is that of the part injected into a twin of the model, so it holds whatever the part's options are. Of
    two sizes that are equally near the one with fewer parameters is taken.

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
            counted[value] = trial([build(value)]).added
        return counted[value]

    smallest = size.smallest(part)
    widths = trial([build(smallest)], look=adapted_widths)
    found = [value for run in size.runs(part, widths) if run for value in nearest_sizes(run, count, budget)]
    fitting = [value for value in found if count(value)]
    if not fitting:
        raise HfpatchError(f"no {size.key} fits the modules that it adapts; name others in target_modules")
    value = min(fitting, key=lambda each: (abs(count(each) - budget), count(each)))
    return value, count(value)


def adapted_widths(model: nn.Module) -> Widths:
    """Return the widths of what a patch adapts: of PEFT's modules, else of the attention's hidden state."""
    if all(isinstance(config, MethodConfig) for config in stack(model).values()):
        return [(site.hidden_size, site.hidden_size) for site in find_sites(model)]
    bases = (unwrapped(module) for module in model.modules() if isinstance(module, BaseTunerLayer))
    return [features(base) for base in bases if any(hasattr(base, name) for name in ("in_features", "nx"))]


def nearest_sizes(run: Sequence[Any], count: Count, budget: int) -> list[Any]:
    """Return the sizes of a run on both sides of the budget; at an end of the run, that end.

    Counts grow about in proportion to the size, so the search interpolates, and bisects every other time.

    Args:
        run: sizes whose counts do not fall from one to the next.
        count: the count of a size.
        budget: the count to match.

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
