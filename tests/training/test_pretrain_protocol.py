"""The pretraining protocol of arXiv 2603.13381: expressible whole, and a few steps of it against plain torch."""

import math

import pytest
import torch
from families import make_config
from training_blocks import make_blocks, metrics_of, plain_loop, trainables

from hfpatch.data.plan import draw_plan
from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch
from hfpatch.recipes.models import GPT2_SMALL, ScratchSettings
from hfpatch.recipes.training import PretrainSettings
from hfpatch.training.architecture import build_model
from hfpatch.training.optim import build_optimizer
from hfpatch.training.pretrain import pretrain, scale_rates
from hfpatch.training.run import Run

STEPS, WARMUP, BATCH, LR, FLOOR, DECAY, CLIP = 7, 3, 4, 3e-2, 0.1, 2**-5, 0.05
PAPER = {
    "steps": 100_000, "batch_size": 480, "warmup_steps": 2000, "lr": 6e-4, "min_lr_ratio": 0.1, "schedule": "cosine",
    "weight_decay": 2**-5, "betas": (0.9, 0.95), "max_grad_norm": 1.0, "evaluate_every": 1000, "diverged_above": 12.0,
    "diagnose_every": 1000,
}  # fmt: skip


def small(**changes):
    """Return GPT-2 without biases, tied, with a nonlinear query."""
    return build_scratch(
        make_config("gpt2", **changes), ScratchSettings(biases=False, query={"path": "nonlinear"}), seed=3
    )


def run(model, folder, **values):
    settings = {
        "steps": STEPS, "batch_size": BATCH, "warmup_steps": WARMUP, "lr": LR, "min_lr_ratio": FLOOR,
        "weight_decay": DECAY, "betas": (0.9, 0.95), "max_grad_norm": CLIP, **values,
    }  # fmt: skip
    blocks = make_blocks(layout="padded")
    plan = draw_plan(blocks=len(blocks), steps=STEPS, batch_size=BATCH, seed=0)
    pretrain(model, Run(PretrainSettings(**settings), blocks, plan, 0, folder))
    return blocks, plan, metrics_of(folder)


def test_steps_of_it_are_adamw_with_clipping_warm_up_and_a_cosine_to_its_floor(tmp_path):
    model, twin = small(), small()
    blocks, plan, lines = run(model, tmp_path)
    given = {"lr": LR, "warmup": WARMUP, "clip": CLIP, "betas": (0.9, 0.95), "decay": DECAY, "floor": FLOOR}
    losses, norms = plain_loop(twin, blocks, plan, **given)
    assert min(norms) > CLIP
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=2e-5)
    falling = [(1 + math.cos(math.pi * step / (STEPS - WARMUP))) / 2 for step in range(STEPS - WARMUP)]
    shares = [1 / 4, 2 / 4, 3 / 4, *(FLOOR + (1 - FLOOR) * share for share in falling)]
    assert [line["lr"] for line in lines] == pytest.approx([LR * share for share in shares])
    # The first step divides each gradient by its own size, rounding too
    torch.testing.assert_close(trainables(model), trainables(twin), rtol=1e-5, atol=2e-4)
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "trust_remote_code=True" in card  # of its class
    (code,) = (tmp_path / "model").glob("*.py")
    assert f"`{code.name}` is under the MIT licence" in card


def test_every_value_of_it_can_be_said_and_every_matrix_decays():
    settings = PretrainSettings(**PAPER)
    assert {name: getattr(settings, name) for name in PAPER} == PAPER
    with torch.device("meta"):
        model = build_model({**GPT2_SMALL, "n_layer": 2, "query": {"path": "nonlinear"}})
    groups = build_optimizer(model, settings).param_groups
    decays = {id(value): group["weight_decay"] for group in groups for value in group["params"]}
    decay_of = {name: decays[id(value)] for name, value in model.named_parameters()}
    gains = {name for name, decay in decay_of.items() if decay == 0.0}
    assert gains == {name for name in decay_of if ".ln_" in name or ".norm_" in name}
    assert {decay_of[f"transformer.{name}.weight"] for name in ("wte", "wpe")} == {2**-5}
    assert "lm_head.weight" not in decay_of  # tied: decays once


@pytest.mark.parametrize(
    ("case", "changes", "width", "factor"),
    [
        ("gpt2", {}, None, 1.0),
        ("gpt2", {"n_inner": 256}, None, 0.5),
        ("gpt2", {}, 4.75, 4 / 4.75),
        ("gpt_neox", {"intermediate_size": 160}, None, 0.8),
        ("llama", {}, None, 4 * 32 / 48),
        ("falcon_multi_query", {}, 5, 0.8),
    ],
)
def test_the_learning_rate_goes_down_as_the_mlp_goes_wide(case, changes, width, factor):
    model = build_scratch(make_config(case, **changes), ScratchSettings(mlp_width=width))
    settings = PretrainSettings(lr=1e-3, learning_rates={"query": 2e-3}, lr_scaling="width")
    scaled = scale_rates(settings, model.config)
    assert (scaled.lr, scaled.learning_rates) == (pytest.approx(1e-3 * factor), {"query": pytest.approx(2e-3 * factor)})
    assert scaled.model_copy(update={"lr": 1e-3, "learning_rates": {"query": 2e-3}}) == settings
    plain = settings.model_copy(update={"lr_scaling": "none"})
    assert scale_rates(plain, model.config) == plain


def test_metrics_show_the_learning_rate_that_was_used_and_training_is_that_of_it(tmp_path):
    models = [small(n_inner=256) for _ in range(2)]
    _, _, scaled = run(models[0], tmp_path / "scaled", lr_scaling="width")
    _, _, stated = run(models[1], tmp_path / "stated", lr=LR / 2)
    assert [line["lr"] for line in scaled] == [line["lr"] for line in stated]
    assert scaled[WARMUP]["lr"] == pytest.approx(LR / 2)
    assert [line["loss"] for line in scaled] == [line["loss"] for line in stated]


def test_an_architecture_that_does_not_tell_its_width_is_refused(tmp_path):
    model = build_scratch(make_config("bloom"), ScratchSettings())
    with pytest.raises(HfpatchError, match=r"training\.lr_scaling: .* bloom has no key .* set training\.lr itself"):
        run(model, tmp_path, lr_scaling="width")
    assert not list(tmp_path.iterdir())
