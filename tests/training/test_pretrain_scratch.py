"""Pretraining of models whose query path is another: compiled, with recomputed activations, accumulated."""

import pytest
import torch
from families import make_config
from training_blocks import make_blocks, numbers_of, run_pretrain

from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings

STEPS = 4
MODELS = {
    "gpt2": ("gpt2", {"path": "nonlinear"}),
    "gpt2, fused": ("gpt2", {"path": "nonlinear", "fused": True}),
    "gpt2, mlp": ("gpt2", {"path": "nonlinear", "source": "mlp"}),
    "llama, fused": ("llama", {"path": "nonlinear", "anchor": "weight", "fused": True}),
    "neox, residual": ("gpt_neox", {"path": "residual"}),
}


def build(name):
    """Return a model without biases: those of keys have no gradient but rounding, which AdamW would blow up."""
    case, query = MODELS[name]
    return build_scratch(make_config(case), ScratchSettings(query=query, biases=False), seed=3)


def run(model, folder, **values):
    values = {"steps": STEPS, "warmup_steps": 1, "diagnose_every": 2, **values}
    evaluation = make_blocks(vocabulary=96, documents=20, seed=1)
    run_pretrain(model, make_blocks(vocabulary=96), folder, evaluation_blocks=evaluation, **values)
    return model


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *((name, {"compile": True}) for name in ("gpt2, mlp", "llama, fused")),
        *((name, {"micro_batch_size": 1}) for name in MODELS),
        *((name, {"gradient_checkpointing": True}) for name in MODELS if "mlp" not in name),
    ],
)
def test_compiled_accumulated_or_with_recomputed_activations_it_trains_the_same(tmp_path, monkeypatch, name, other):
    monkeypatch.setattr("hfpatch.training.loop.COMPILE_BACKEND", "aot_eager")
    torch.compiler.reset()
    plain, changed = run(build(name), tmp_path / "plain"), run(build(name), tmp_path / "other", **other)
    assert numbers_of(tmp_path / "other") == pytest.approx(numbers_of(tmp_path / "plain"), rel=2e-5, abs=1e-6)
    assert len(numbers_of(tmp_path / "plain")) == STEPS + 2 + 3 * 2 * 2
    for (key, one), (_, two) in zip(plain.named_parameters(), changed.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=2e-5, msg=key)


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
