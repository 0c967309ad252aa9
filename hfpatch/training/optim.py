"""AdamW and the learning rate's course."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from hfpatch.training.precision import trainable_parameters
from hfpatch.training.settings import LoopSettings

_SCHEDULERS = {"cosine": "cosine_with_min_lr", "linear": "linear", "constant": "constant_with_warmup"}


def build_optimizer(model: torch.nn.Module, settings: LoopSettings) -> torch.optim.AdamW:
    """AdamW over what is trained; weight decay on matrices only, never on norms and biases (one dimension)."""
    parameters = trainable_parameters(model).values()
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=1e-8, fused=True)


def build_scheduler(
    optimizer: torch.optim.Optimizer, settings: LoopSettings, *, steps: int, min_lr_ratio: float = 0.0
) -> LRScheduler:
    """Build ``transformers``' own schedule.

    With w warm-up steps of n, step s = 0 ... n-1 has lr times

    s / w                                             for s < w
    m + (1 - m) · (1 + cos(π (s - w) / (n - w))) / 2  cosine, m = ``min_lr_ratio``
    (n - s) / (n - w)                                 linear
    1                                                 constant
    """
    cosine = settings.schedule == "cosine"
    scheduler: LRScheduler = get_scheduler(
        _SCHEDULERS[settings.schedule],
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=steps,
        scheduler_specific_kwargs={"min_lr_rate": min_lr_ratio} if cosine else None,
    )
    return scheduler
