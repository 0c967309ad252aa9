"""Divergence as an outcome of pretraining: recorded, never an error, and the same again on resuming."""

import json
import math

import pytest
from training_blocks import metrics_of, same, trainables
from training_blocks import run_pretrain as run

from hfpatch.errors import HfpatchError

STEPS, VOCABULARY = 6, 64


def spoilt(model, call, factor):
    """Let the model's body multiply its output in one forward pass of training."""
    calls = []

    def hook(module, args, output):
        calls.append(1) if module.training else None
        if module.training and len(calls) == call:
            output.last_hidden_state = output.last_hidden_state * factor
        return output

    model.gpt_neox.register_forward_hook(hook)
    return model


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize(("factor", "bound"), [(float("nan"), None), (float("inf"), 50.0), (1e3, 6.0)])
def test_it_ends_the_run_with_its_step_and_no_model(base, blocks, tmp_path, factor, bound, micro):
    model, told = spoilt(base(), 4 if micro is None else 7, factor), []
    result = run(
        model, blocks, tmp_path, on_step=told.append, diverged_above=bound, micro_batch_size=micro,
        evaluation_blocks=blocks.head(3), evaluate_every=1,
    )  # fmt: skip
    assert (result.diverged_step, result.steps, result.stopped_early) == (4, 4, False)
    found = metrics_of(tmp_path)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4] == [0, *(record.step for record in told)]
    assert "eval_loss" in found[3]
    assert "eval_loss" not in found[4]
    assert ("loss" in found[4]) == math.isfinite(factor)
    assert not (tmp_path / "model").exists()
    again = run(
        base(), blocks, tmp_path, resume=True, on_step=lambda record: pytest.fail("trained again"),
        diverged_above=bound, evaluation_blocks=blocks.head(3), evaluate_every=1,
    )  # fmt: skip
    assert again.to_json() | {"peak_memory_bytes": 0} == result.to_json() | {"peak_memory_bytes": 0}
    assert metrics_of(tmp_path) == found


def test_the_update_that_it_names_is_left_out(base, blocks, tmp_path):
    states = []
    model = spoilt(base(), 4, 1e3)
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
    assert run(spoilt(base(), 3, 1e3), blocks, tmp_path / "within", **values).diverged_step is None
    assert (tmp_path / "within" / "model").exists()
    assert run(spoilt(base(), 4, 1e3), blocks, tmp_path / "after", **values).diverged_step == 4


def test_a_loss_on_the_evaluation_blocks_counts_as_well(base, blocks, tmp_path):
    values = {"evaluation_blocks": blocks.head(3), "evaluate_every": 2, "warmup_steps": 1}
    huge = run(base(), blocks, tmp_path, diverged_above=5.0, lr=30.0, max_grad_norm=None, **values)
    found = metrics_of(tmp_path)
    assert huge.diverged_step == found[-1]["step"] < STEPS
    assert max(found[-1]["loss"], found[-1].get("eval_loss", 0)) > 5.0
    assert all(line.get("eval_loss", 0) <= 5.0 for line in found[:-1])


def test_a_first_loss_that_is_no_number_is_null_in_the_result(base, blocks, tmp_path):
    told = run(spoilt(base(), 1, float("nan")), blocks, tmp_path).to_json()
    assert (told["diverged_step"], told["final_loss"]) == (1, None)
    json.dumps(told, allow_nan=False)


def test_a_bound_below_the_loss_of_an_untrained_model_is_refused(base, blocks, tmp_path):
    for bound in (4.0, math.log(VOCABULARY)):
        with pytest.raises(HfpatchError, match=r"diverged_above is 4.* must be above ln V = 4\.16, .* 64 tokens"):
            run(base(), blocks, tmp_path, diverged_above=bound)
    assert not list(tmp_path.iterdir())
