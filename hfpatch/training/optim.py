"""Trainable parameters and their dtype, AdamW, and the learning rate's schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hfpatch.errors import HfpatchError
from hfpatch.recipes.training import Group, LoopSettings, group_of

_NORM_OR_BIAS = re.compile(r"(^|[._])(layer|rms)?norm\d*([._]|$)|bias[^.]*$")


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters by name, each tied tensor once; HfpatchError if there is none."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise HfpatchError("the model has nothing to train: every parameter is frozen; patch it first")
    return parameters


def cast_trainables(
    model: torch.nn.Module, dtype: torch.dtype, by_group: Mapping[Group, torch.dtype] | None = None
) -> None:
    """Give every trained tensor ``dtype``, or that of its group, in place."""
    for name, parameter in trainable_parameters(model).items():
        parameter.data = parameter.data.to((by_group or {}).get(group_of(name), dtype))


def build_optimizer(model: torch.nn.Module, settings: LoopSettings) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices and embeddings, never on norms and biases.

    Norms and biases are vectors, and tensors of more dimensions with these names: gains by head, biases by expert. Each
    tensor group has the learning rate that the settings give it, see :mod:`hfpatch.recipes.training`.
    """
    by_group: dict[tuple[Group, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trainable_parameters(model).items():
        decays = parameter.ndim >= 2 and not _NORM_OR_BIAS.search(name)
        by_group.setdefault((group_of(name), decays), []).append(parameter)
    groups = [
        {
            "params": parameters,
            "weight_decay": settings.weight_decay if decays else 0.0,
            "lr": settings.learning_rates.get(group, settings.lr),
        }
        for (group, decays), parameters in by_group.items()
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=1e-8, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: LoopSettings, *, steps: int) -> LRScheduler:
    """Build the schedule of the learning rate.

    With w warm-up steps of n, d steps of decay and m = ``min_lr_ratio``, step s = 0 ... n-1 has lr times

    (s + 1) / (w + 1)                                 for s < w
    m + (1 - m) · (1 + cos(π (s - w) / (n - w))) / 2  cosine
    (n - s) / (n - w)                                 linear
    1                                                 constant
    1 for s < n - d, then m + (1 - m) · (n - s) / d   wsd

    After warm-up these are the formulas of ``transformers``, whose first warm-up step has a rate of zero; here every
    step trains, and step w is the first at the peak, as there.
    """
    warmup, floor = settings.warmup_steps, settings.min_lr_ratio
    decay = min(settings.decay_steps or max(1, steps // 10), max(1, steps - warmup))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        left = max(0, steps - step)
        if settings.schedule == "constant":
            return 1.0
        if settings.schedule == "wsd":
            return floor + (1 - floor) * min(1.0, left / decay)
        left_of_decay = left / max(1, steps - warmup)
        if settings.schedule == "linear":
            return left_of_decay
        return floor + (1 - floor) * (1 + math.cos(math.pi * (1 - left_of_decay))) / 2

    return LambdaLR(optimizer, share)
