import math

import pytest
import torch

from hfpatch.training.optim import build_optimizer, build_scheduler
from hfpatch.training.settings import PretrainSettings, TrainingSettings


def rates(settings, steps, floor=0.0):
    optimizer = build_optimizer(torch.nn.Linear(2, 2), settings)
    scheduler = build_scheduler(optimizer, settings, steps=steps, min_lr_ratio=floor)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def cosine(step, warmup, steps, floor):
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("schedule", "floor", "after"),
    [
        ("cosine", 0.0, cosine),
        ("cosine", 0.1, cosine),
        ("linear", 0.0, lambda step, warmup, steps, floor: (steps - step) / (steps - warmup)),
        ("constant", 0.0, lambda step, warmup, steps, floor: 1.0),
    ],
)
def test_schedules_against_their_formulas(schedule, floor, after, warmup):
    settings = TrainingSettings(lr=3e-4, schedule=schedule, warmup_steps=warmup)
    expected = [3e-4 * (step / warmup if step < warmup else after(step, warmup, 30, floor)) for step in range(30)]
    assert rates(settings, 30, floor) == pytest.approx(expected, rel=1e-9, abs=1e-18)


def test_weight_decay_on_matrices_only():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Embedding(3, 4))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(model, PretrainSettings(weight_decay=0.3, betas=(0.8, 0.9)))
    decay = {id(value): group["weight_decay"] for group in optimizer.param_groups for value in group["params"]}
    assert decay == {id(value): 0.3 if value.ndim == 2 else 0.0 for value in model.parameters() if value.requires_grad}
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
