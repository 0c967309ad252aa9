from functools import partial

import pytest
import torch
from training_blocks import Killed, metrics_of, run_pretrain
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.training.validation import mean_loss

STEPS = 6
run = partial(run_pretrain, evaluate_every=4, save_every=2)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2"])
def test_trains_everything_evaluates_and_saves_a_folder(base, blocks, tmp_path, kind):
    model = base(kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    tokenizer = train_tokenizer(["the mill"], 257)
    held_out = blocks.head(7)
    untrained = mean_loss(model, held_out, batch_size=4)
    result = run(model, blocks, tmp_path, evaluation_blocks=held_out, tokenizer=tokenizer)
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


def test_a_frozen_or_low_precision_model_is_trained_in_float32(base, blocks, tmp_path):
    model = base(dtype=torch.bfloat16).requires_grad_(False)
    run(model, blocks, tmp_path)
    assert {(value.dtype, value.requires_grad) for value in model.parameters()} == {(torch.float32, True)}


def test_a_killed_run_resumes_bit_equal(base, blocks, tmp_path):
    def on_step(record):
        if record.step == 5:
            raise Killed

    straight, resumed = base(), base()
    run(straight, blocks, tmp_path / "straight", evaluation_blocks=blocks.head(3))
    with pytest.raises(Killed):
        run(base(), blocks, tmp_path / "broken", evaluation_blocks=blocks.head(3), on_step=on_step)
    run(resumed, blocks, tmp_path / "broken", evaluation_blocks=blocks.head(3), resume=True)
    for (name, one), (_, other) in zip(straight.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(one, other), name
