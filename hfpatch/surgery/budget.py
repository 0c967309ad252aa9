"""Exact parameter counts without injecting anything into the model, and the LoRA rank that matches a count."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftConfig
from torch import nn

from hfpatch.errors import HfpatchError, whole_number
from hfpatch.sites import base_model, features, find_sites, require_matrix, select_sites, survey, unwrapped
from hfpatch.surgery.patch import patch, patch_summary, unpatch
from hfpatch.tuners.adapters import has_adapters
from hfpatch.tuners.config import method_name


def count_added(model: nn.Module, configs: Sequence[PeftConfig]) -> int:
    """Return how many parameters the configurations would add to the model, which stays as it is.

    The count is exact: the configurations are injected into a twin of the model.
    """
    return Trial(model)(configs).added if configs else 0


class Trial:
    """Tries configurations on a twin of a model, which stays as it is.

    The twin is on the meta device; for the few tuners whose tensors depend on the values of the weights (ShiRA,
    AdaMSS) it is a copy of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.twin = meta_twin(model)

    def __call__(self, configs: Sequence[PeftConfig], *, look: Callable[[nn.Module], Any] = patch_summary) -> Any:
        """Return what ``look`` finds in the twin with the configurations in it: by default its parameter counts.

        Raises:
            HfpatchError: as `patch`.
        """
        try:
            patch(self.twin, list(configs))
        except HfpatchError as error:
            if not isinstance(error.__cause__, NotImplementedError) or not _is_meta(self.twin):
                raise
            if _is_meta(self.model):
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


def _is_meta(model: nn.Module) -> bool:
    return all(parameter.is_meta for parameter in model.parameters())


def meta_twin(model: nn.Module) -> nn.Module:
    """Return a model of the same class and configuration whose tensors have shapes and no values."""
    base = base_model(model)
    with torch.device("meta"):
        twin: nn.Module = type(base)(copy.deepcopy(base.config))
    return twin


def attention_modules(
    model: nn.Module, *, layers: int | Sequence[int] | None = None, pattern: str | Sequence[str] | None = None
) -> list[str]:
    """Return the names, as LoRA's ``target_modules``, of the QKV projection(s) and the output projection.

    The names are full paths, so that equally named modules elsewhere in a block are not touched.

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
        target_modules: names of modules, matched as PEFT does: a full path or its last parts.

    Raises:
        HfpatchError: if the budget is not a positive whole number, or no module matches.
    """
    budget = whole_number("budget", budget, at_least=1)
    per_rank = lora_parameters_per_rank(model, target_modules)
    below = budget // per_rank
    return max(1, below if budget - below * per_rank <= (below + 1) * per_rank - budget else below + 1)


def lora_parameters_per_rank(model: nn.Module, target_modules: Sequence[str]) -> int:
    """Return how many parameters one unit of LoRA rank costs on the given modules.

    Raises:
        HfpatchError: if no module matches, or one that does is not a linear projection.
    """
    target_modules = [target_modules] if isinstance(target_modules, str) else target_modules
    suffixes = tuple(f".{name}" for name in target_modules)
    found = {
        name: unwrapped(module)
        for name, module in base_model(model).named_modules()
        if name in target_modules or name.endswith(suffixes)
    }
    for name, module in found.items():
        require_matrix(module, name)
    widths = [sum(features(module)) for module in found.values()]
    if not widths:
        raise HfpatchError(f"target_modules={list(target_modules)}: no module of this model has that name")
    return sum(widths)
