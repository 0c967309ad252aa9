"""Pretraining: all weights trained, divergence recorded as an outcome, and models with other query paths."""

import math
from functools import partial

import pytest
import torch
from families import make_config
from training_blocks import make_blocks, metrics_of, numbers_of, run_pretrain, same, spoil, trainables
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.training.validation import mean_loss

STEPS, VOCABULARY = 6, 64
run = partial(run_pretrain, save_every=2)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2"])
def test_trains_everything_evaluates_and_saves_a_folder(base, blocks, tmp_path, kind):
    model = base(kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    tokenizer = train_tokenizer(["the mill"], 257)
    held_out = blocks.head(7)
    untrained = mean_loss(model, held_out, batch_size=4)
    result = run(model, blocks, tmp_path, held_out=held_out, evaluate_every=4, tokenizer=tokenizer)
    assert not any(torch.equal(value, before[name]) for name, value in model.named_parameters())
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 4, 6]
    assert lines[-1]["lr"] > 0.1 * 1e-2
    assert result.final_eval_loss == lines[-1]["eval_loss"] == pytest.approx(mean_loss(model, held_out, batch_size=3))
    assert lines[0] == {"step": 0, "lr": 0.0, "tokens": 0, "seconds": 0.0, "eval_loss": pytest.approx(untrained)}
    assert lines[-1]["loss"] < lines[1]["loss"]
    assert (result.steps, result.diverged_step) == (STEPS, None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.use_cache
    ids = blocks[0]["input_ids"][None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == 0
    assert (tmp_path / "model" / "model.safetensors").exists()
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert f"- Steps: {STEPS}\n" in card
    assert f"- Loss on held-out text: {result.final_eval_loss:.4f} nats per token\n" in card
    assert "trust_remote_code" not in card


def test_the_card_of_the_best_weights_has_their_loss(base, blocks, tmp_path):
    model, held_out = base("gpt2"), blocks.head(7)
    result = run(model, blocks, tmp_path, held_out=held_out, evaluate_every=1, keep_best=True, lr=0.3)
    assert result.best_step < STEPS
    loss = mean_loss(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), held_out, batch_size=4)
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert f"- Weights: those after step {result.best_step}, the best on held-out text\n" in card
    assert f"- Loss on held-out text: {loss:.4f} nats per token\n" in card


def test_a_frozen_or_low_precision_model_is_trained_in_float32(base, blocks, tmp_path):
    model = base(dtype=torch.bfloat16).requires_grad_(False)
    run(model, blocks, tmp_path)
    assert {(value.dtype, value.requires_grad) for value in model.parameters()} == {(torch.float32, True)}


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize(("factor", "bound"), [(float("nan"), None), (float("inf"), 50.0), (1e3, 6.0)])
def test_it_ends_the_run_with_its_step_and_no_model(base, blocks, tmp_path, factor, bound, micro):
    model, records = spoil(base(), 4 if micro is None else 7, factor), []
    result = run(
        model, blocks, tmp_path, on_step=records.append, diverged_above=bound, micro_batch_size=micro,
        held_out=blocks.head(3), evaluate_every=1,
    )  # fmt: skip
    assert (result.diverged_step, result.steps, result.stopped_early) == (4, 4, False)
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] == [0, *(record.step for record in records)]
    assert "eval_loss" in lines[3]
    assert "eval_loss" not in lines[4]
    assert ("loss" in lines[4]) == math.isfinite(factor)
    assert not (tmp_path / "model").exists()
    again = run(
        base(), blocks, tmp_path, on_step=lambda record: pytest.fail("trained again"),
        diverged_above=bound, held_out=blocks.head(3), evaluate_every=1,
    )  # fmt: skip
    assert again.to_json() | {"peak_memory_bytes": 0} == result.to_json() | {"peak_memory_bytes": 0}
    assert metrics_of(tmp_path) == lines


def test_the_update_that_it_names_is_left_out(base, blocks, tmp_path):
    states = []
    model = spoil(base(), 4, 1e3)
    run(model, blocks, tmp_path, on_step=lambda record: states.append(trainables(model)), diverged_above=6.0)
    assert same(states[2], states[3])
    assert not same(states[1], states[2])


def test_a_gradient_that_is_not_finite_counts_too(base, blocks, tmp_path):
    model = base()
    model.gpt_neox.layers[0].attention.dense.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = run(model, blocks, tmp_path)
    assert result.diverged_step == 1
    assert math.isfinite(result.final_loss)
    assert all(value.isfinite().all() for value in model.parameters())


def test_the_bound_holds_after_warm_up_only(base, blocks, tmp_path):
    values = {"diverged_above": 6.0, "warmup_steps": 3}
    assert run(spoil(base(), 3, 1e3), blocks, tmp_path / "within", **values).diverged_step is None
    assert (tmp_path / "within" / "model").exists()
    assert run(spoil(base(), 4, 1e3), blocks, tmp_path / "after", **values).diverged_step == 4


def test_a_loss_on_the_evaluation_blocks_counts_as_well(base, blocks, tmp_path):
    values = {"held_out": blocks.head(3), "evaluate_every": 2, "warmup_steps": 1}
    huge = run(base(), blocks, tmp_path, diverged_above=5.0, lr=30.0, max_grad_norm=None, **values)
    lines = metrics_of(tmp_path)
    assert huge.diverged_step == lines[-1]["step"] < STEPS
    assert max(lines[-1]["loss"], lines[-1].get("eval_loss", 0)) > 5.0
    assert all(line.get("eval_loss", 0) <= 5.0 for line in lines[:-1])


def test_a_bound_below_the_loss_of_an_untrained_model_is_refused(base, blocks, tmp_path):
    for bound in (4.0, math.log(VOCABULARY)):
        with pytest.raises(HfpatchError, match=r"diverged_above is 4.* must be above ln V = 4\.16, .* 64 tokens"):
            run(base(), blocks, tmp_path, diverged_above=bound)
    assert not list(tmp_path.iterdir())


MODELS = {
    "gpt2": ("gpt2", {"path": "nonlinear"}),
    "gpt2, fused": ("gpt2", {"path": "nonlinear", "fused": True}),
    "llama, fused": ("llama", {"path": "nonlinear", "anchor": "weight", "fused": True}),
    "neox, residual": ("gpt_neox", {"path": "residual"}),
}


def build(name):
    """Return a model without biases: those of keys have no gradient but rounding, which AdamW would blow up."""
    case, query = MODELS[name]
    return build_scratch(make_config(case), ScratchSettings(query=query, biases=False), seed=3)


def run_scratch(model, folder, **values):
    values = {"steps": 4, "warmup_steps": 1, "diagnose_every": 2, **values}
    evaluation = make_blocks(vocabulary=96, documents=20, seed=1)
    run_pretrain(model, make_blocks(vocabulary=96), folder, held_out=evaluation, **values)
    return model


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *(pytest.param(name, {"compile": True}, marks=pytest.mark.slow) for name in ("gpt2", "llama, fused")),
        *((name, {"micro_batch_size": 1}) for name in MODELS),
        *((name, {"gradient_checkpointing": True}) for name in MODELS),
    ],
)
def test_compiled_accumulated_or_with_recomputed_activations_it_trains_the_same(tmp_path, monkeypatch, name, other):
    monkeypatch.setattr("hfpatch.training.loop.COMPILE_BACKEND", "eager")
    torch.compiler.reset()
    plain, changed = run_scratch(build(name), tmp_path / "plain"), run_scratch(build(name), tmp_path / "other", **other)
    assert numbers_of(tmp_path / "other") == pytest.approx(numbers_of(tmp_path / "plain"), rel=2e-5, abs=1e-6)
    assert len(numbers_of(tmp_path / "plain")) == 4 + 2 + 3 * 2 * 2
    torch.testing.assert_close(trainables(changed), trainables(plain), rtol=1e-3, atol=2e-5)


def test_a_model_that_cannot_recompute_its_blocks_is_refused(tmp_path):
    model = build("gpt2")
    model.supports_gradient_checkpointing = False
    with pytest.raises(HfpatchError, match=r"training\.gradient_checkpointing: .* does not support it; leave it out"):
        run_scratch(model, tmp_path, gradient_checkpointing=True)
    assert not list(tmp_path.iterdir())
