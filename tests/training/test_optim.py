import math

import pytest
import torch
from training_blocks import rates_of

from hfpatch.recipes.training import PretrainSettings, TrainingSettings
from hfpatch.training.optim import build_optimizer, build_scheduler


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
    settings = TrainingSettings(lr=3e-4, schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)
    expected = [
        3e-4 * ((step + 1) / (warmup + 1) if step < warmup else after(step, warmup, 30, floor)) for step in range(30)
    ]
    rates = rates_of(settings, 30)
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-18)
    assert min(rates) > 0  # no step is wasted


@pytest.mark.parametrize(("asked", "decay"), [(None, 3), (10, 10), (99, 26)])
@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_wsd_holds_and_then_falls_in_a_line(asked, decay, floor):
    settings = TrainingSettings(lr=3e-4, schedule="wsd", warmup_steps=4, decay_steps=asked, min_lr_ratio=floor)
    expected = [
        (step + 1) / 5 if step < 4
        else 1.0 if step < 30 - decay
        else floor + (1 - floor) * (30 - step) / decay
        for step in range(30)
    ]  # fmt: skip
    assert rates_of(settings, 30) == pytest.approx([3e-4 * share for share in expected], rel=1e-9, abs=1e-18)


def test_each_tensor_group_has_its_own_learning_rate():
    model = torch.nn.Module()
    names = {
        "preproj_up": 1e-3, "preproj_down": 1e-3, "preproj_skip": 5e-2, "nonlinear_query_first": 2e-4,
        "nonlinear_query_norm": 2e-4, "lora_A": 1e-5, "classifier": 1e-5,
    }  # fmt: skip
    for name in names:
        part = torch.nn.LayerNorm(2) if name.endswith("norm") else torch.nn.Linear(2, 2, bias=False)
        model.add_module(name, torch.nn.ModuleDict({"default": part}))
    chosen = {"pre_projection": 1e-3, "skip": 5e-2, "query": 2e-4}
    settings = TrainingSettings(lr=1e-5, learning_rates=chosen, warmup_steps=0, steps=10, weight_decay=0.1)
    optimizer = build_optimizer(model, settings)
    scheduler = build_scheduler(optimizer, settings, steps=10)
    group_of = {id(value): group for group in optimizer.param_groups for value in group["params"]}
    for name, value in model.named_parameters():
        assert group_of[id(value)]["lr"] == names[name.split(".")[0]], name
        assert group_of[id(value)]["weight_decay"] == (0.0 if value.ndim == 1 else 0.1), name
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    shares = {group["lr"] / group["initial_lr"] for group in optimizer.param_groups}
    assert max(shares) == pytest.approx(min(shares)) == pytest.approx(0.5)


def test_groups_that_do_not_exist_and_weight_decay_on_matrices_only():
    with pytest.raises(ValueError, match="learning_rates"):
        TrainingSettings(learning_rates={"pre_projektion": 1e-3})
    model = torch.nn.Module()
    model.proj, model.frozen = torch.nn.Linear(4, 4), torch.nn.Embedding(3, 4).requires_grad_(False)
    model.wte, model.preproj_up = torch.nn.Embedding(3, 4), torch.nn.ModuleDict({"normal": torch.nn.Linear(4, 4)})
    model.ln, model.q_norm = torch.nn.LayerNorm(4), torch.nn.LayerNorm((2, 4))  # a gain for each head
    model.down_proj_bias = torch.nn.Parameter(torch.zeros(2, 4))  # of two experts
    optimizer = build_optimizer(model, PretrainSettings(weight_decay=0.3, betas=(0.8, 0.9)))
    decay = {id(value): group["weight_decay"] for group in optimizer.param_groups for value in group["params"]}
    decayed = {"proj.weight", "wte.weight", "preproj_up.normal.weight"}
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert decay == {id(value): 0.3 if name in decayed else 0.0 for name, value in trained.items()}
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
