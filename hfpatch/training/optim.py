"""AdamW and the learning rate's course."""

from __future__ import annotations

from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from hfpatch.recipes.training import LoopSettings, by_group
from hfpatch.training.precision import trainable_parameters

_SCHEDULERS = {
    "cosine": "cosine_with_min_lr",
    "linear": "linear",
    "constant": "constant_with_warmup",
}


def build_optimizer(model: torch.nn.Module, settings: LoopSettings) -> torch.optim.AdamW:
    """AdamW over what is trained; weight decay on matrices only, never on norms and biases (one dimension).

    Embeddings are matrices: where they are trained they decay too, a tied head once.

    Each tensor group has the learning rate that the settings give it, see :mod:`hfpatch.recipes.training`.
    """
    parameters = trainable_parameters(model)
    groups = []
    for group, names in by_group(parameters).items():
        tensors = [parameters[name] for name in names]
        lr = settings.learning_rates.get(group, settings.lr)
        matrices, vectors = _split(tensors)
        groups.append({"params": matrices, "weight_decay": settings.weight_decay, "lr": lr})
        groups.append({"params": vectors, "weight_decay": 0.0, "lr": lr})
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=1e-8, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: LoopSettings, *, steps: int) -> LRScheduler:
    """Build ``transformers``' own schedule, but for wsd, whose warm-up starts at ``min_lr_ratio`` there.

    With w warm-up steps of n, d steps of decay and m = ``min_lr_ratio``, step s = 0 ... n-1 has lr times

    s / w                                             for s < w
    m + (1 - m) · (1 + cos(π (s - w) / (n - w))) / 2  cosine
    (n - s) / (n - w)                                 linear
    1                                                 constant
    1 for s < n - d, then m + (1 - m) · (n - s) / d   wsd
    """
    if settings.schedule == "wsd":
        decay = min(settings.decay_steps or max(1, steps // 10), max(1, steps - settings.warmup_steps))
        floor, warmup = settings.min_lr_ratio, settings.warmup_steps
        return LambdaLR(optimizer, partial(_wsd, steps=steps, warmup=warmup, decay=decay, floor=floor))
    scheduler: LRScheduler = get_scheduler(
        _SCHEDULERS[settings.schedule],
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=steps,
        scheduler_specific_kwargs={"min_lr_rate": settings.min_lr_ratio} if settings.schedule == "cosine" else None,
    )
    return scheduler


def current_lr(optimizer: torch.optim.Optimizer, settings: LoopSettings) -> float:
    """Return the learning rate of a tensor group that the settings do not single out."""
    group = optimizer.param_groups[0]
    return float(settings.lr * group["lr"] / group["initial_lr"])


def _split(tensors: list[torch.nn.Parameter]) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    return [tensor for tensor in tensors if tensor.ndim >= 2], [tensor for tensor in tensors if tensor.ndim < 2]


def _wsd(step: int, *, steps: int, warmup: int, decay: int, floor: float) -> float:
    """Return the share of the peak learning rate at ``step``; see :func:`build_scheduler`."""
    if step < warmup:
        return step / warmup
    return floor + (1 - floor) * min(1.0, max(0, steps - step) / decay)
