"""Pretraining of models whose query path is another: compiled, with recomputed activations, accumulated."""

import pytest
import torch
from families import make_config
from training_blocks import make_blocks, numbers_of

from hfpatch.data.plan import draw_plan
from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.recipes.training import PretrainSettings
from hfpatch.training.pretrain import pretrain

STEPS, BATCH = 4, 4
MODELS = {
    "gpt2": ("gpt2", {"path": "nonlinear"}),
    "gpt2, fused": ("gpt2", {"path": "nonlinear", "fused": True}),
    "gpt2, mlp": ("gpt2", {"path": "nonlinear", "source": "mlp"}),
    "llama, fused": ("llama", {"path": "nonlinear", "anchor": "weight", "fused": True}),
    "neox, residual": ("gpt_neox", {"path": "residual"}),
}
READS_X = [name for name in MODELS if "mlp" not in name]


def build(name):
    """Return a model without biases: those of keys have no gradient but rounding, which AdamW would blow up."""
    case, query = MODELS[name]
    return build_scratch(make_config(case), ScratchSettings(query=query, biases=False), seed=3)


def run(model, folder, **values):
    blocks = make_blocks(vocabulary=96)
    settings = {"steps": STEPS, "batch_size": BATCH, "warmup_steps": 1, "lr": 1e-2, "diagnose_every": 2, **values}
    plan = draw_plan(blocks=len(blocks), steps=STEPS, batch_size=BATCH, seed=0)
    pretrain(
        model, settings=PretrainSettings(**settings), blocks=blocks, plan=plan, seed=0, run_dir=folder,
        evaluation_blocks=make_blocks(vocabulary=96, documents=20, seed=1),
    )  # fmt: skip
    return model


def check_equal(folder, models):
    assert numbers_of(folder / "other") == pytest.approx(numbers_of(folder / "plain"), rel=2e-5, abs=1e-6)
    assert len(numbers_of(folder / "plain")) == STEPS + 2 + 3 * 2 * 2
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("name", ["gpt2, mlp", "llama, fused"])
def test_compiled_it_trains_the_same(tmp_path, monkeypatch, name):
    monkeypatch.setattr("hfpatch.training.loop.COMPILE_BACKEND", "aot_eager")
    torch.compiler.reset()
    models = run(build(name), tmp_path / "plain"), run(build(name), tmp_path / "other", compile=True)
    check_equal(tmp_path, models)


@pytest.mark.parametrize("name", MODELS)
def test_accumulated_it_trains_the_same(tmp_path, name):
    models = run(build(name), tmp_path / "plain"), run(build(name), tmp_path / "other", micro_batch_size=1)
    check_equal(tmp_path, models)


@pytest.mark.parametrize("name", READS_X)
def test_with_recomputed_activations_it_trains_the_same(tmp_path, name):
    models = run(build(name), tmp_path / "plain"), run(build(name), tmp_path / "other", gradient_checkpointing=True)
    check_equal(tmp_path, models)


def test_under_autocast_it_trains_nearly_the_same(tmp_path):
    name = "llama, fused"
    run(build(name), tmp_path / "plain")
    run(build(name), tmp_path / "other", autocast="bfloat16")
    assert numbers_of(tmp_path / "other") == pytest.approx(numbers_of(tmp_path / "plain"), rel=0.03, abs=0.01)
    assert numbers_of(tmp_path / "other") != numbers_of(tmp_path / "plain")


def test_a_query_that_reads_another_block_cannot_recompute_its_own(tmp_path):
    with pytest.raises(
        HfpatchError, match=r"training\.gradient_checkpointing: .* reads another block's MLP; leave it out"
    ):
        run(build("gpt2, mlp"), tmp_path, gradient_checkpointing=True)
    assert not list(tmp_path.iterdir())
