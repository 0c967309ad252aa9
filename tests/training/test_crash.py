"""Runs that end before their time: SIGKILL at random instants, SIGTERM, losses that are not finite."""

import json
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file
from training_blocks import make_blocks, metrics_of, run_probe, same, spoil, trainables

from hfpatch.errors import HfpatchError
from hfpatch.support.signals import sigterm_answered_by
from hfpatch.training.activations import CheapRecomputation
from hfpatch.training.interruption import Terminated, leave, watch_sigterm

TESTS = Path(__file__).parent.parent
KILLS = {"probe": 20, "pretrain": 10}
STEPS = 8


def run(model, folder, **values):
    return run_probe(model, make_blocks(), folder, **values)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What is told of each kind of run: {kind: {"kills": ..., "ends": ..., ...}}."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path_factory.mktemp("killed")), str(os.getpid()), json.dumps(KILLS)]
    done = forked.python([TESTS / "crash_run.py", *arguments], env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLS)
def test_killed_at_random_instants_it_ends_bit_equal_every_time(killed, kind):
    report = killed[kind]
    assert report["kills"] == KILLS[kind]
    # Two layers, before training and after each second step of 16
    assert report["diagnostics"] == {"probe": 0, "pretrain": 2 * 9}[kind]
    assert 0 < report["ends"] == report["equal"]
    assert len(set(report["steps"])) > 3  # killed at different steps
    assert report["leftovers"] > 0 or kind == "pretrain"  # and within a save; half as many kills may all miss one


@pytest.mark.parametrize("recompute", [False, True])
def test_sigterm_finishes_the_step_saves_and_leaves(patched, tmp_path, monkeypatch, recompute):
    if recompute:  # in the backward pass, of micro-batches under autocast
        monkeypatch.setattr("hfpatch.training.activations.FEWEST_VALUES", 1)
    run = partial(run_probe, blocks=make_blocks(), micro_batch_size=2, autocast="bfloat16" if recompute else None)
    entered, enter = [], CheapRecomputation.__enter__
    monkeypatch.setattr(CheapRecomputation, "__enter__", lambda self: entered.append(self) or enter(self))
    straight, broken, resumed = (patched(dropout=0.2) for _ in range(3))
    run(straight, folder=tmp_path / "straight")
    assert bool(entered) is recompute
    handler = signal.getsignal(signal.SIGTERM)

    def on_step(record):
        if record.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated) as caught:
        run(broken, folder=tmp_path / "broken", on_step=on_step)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert caught.value.code == 143
    folders = [path.name for path in (tmp_path / "broken" / "checkpoints").iterdir()]
    assert folders == [f"step-{caught.value.step:08d}"]
    assert len(metrics_of(tmp_path / "broken")) == caught.value.step in (3, 4)
    run(resumed, folder=tmp_path / "broken")
    assert same(trainables(straight), trainables(resumed))
    assert [line["loss"] for line in metrics_of(tmp_path / "broken")] == [
        line["loss"] for line in metrics_of(tmp_path / "straight")
    ]


def test_sigterm_in_the_last_step_is_not_forgotten(patched, tmp_path):
    whole, resumed = patched(), patched()

    def on_step(record):
        if record.step == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated), sigterm_answered_by(leave):
        run(whole, tmp_path, on_step=on_step)
    run(resumed, tmp_path, on_step=lambda record: pytest.fail("trained again"))
    assert same(trainables(whole), trainables(resumed))


@pytest.mark.parametrize("error", [None, HfpatchError("other")])
def test_a_sigterm_that_nobody_answered_acts_as_before_in_the_end_and_a_second_at_once(error):
    signals = []
    before = signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    try:
        with suppress(HfpatchError), watch_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals == []
            if error:
                raise error
        assert signals == ([] if error else [1])
        signals.clear()
        with watch_sigterm() as watch:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (watch.asked, signals) == (True, [])
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_loss_is_left_out_and_counted_where_asked(patched, tmp_path, value):
    model = spoil(patched(), 4, value)
    result = run(model, tmp_path, on_bad_loss="skip", save_every=1, keep_checkpoints=9)
    lines = metrics_of(tmp_path)
    assert result.skipped_steps == 1
    assert [line["step"] for line in lines if "loss" not in line] == [4]
    assert [line["step"] for line in lines if line.get("skipped")] == [4]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert result.final_loss == lines[-1]["loss"]
    states = [load(tmp_path, step) for step in (3, 4, 5)]
    assert same(states[0], states[1])
    assert not same(states[1], states[2])


def load(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "trainable.safetensors")


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_gradient_that_is_not_finite_stops_before_it_does_harm(patched, tmp_path, clip):
    model = patched()
    weight = next(value for name, value in model.named_parameters() if "lora_B" in name)
    calls = []

    def hook(gradient):
        calls.append(1)
        return gradient * float("inf") if len(calls) == 3 else gradient

    weight.register_hook(hook)
    message = r"step 3: the loss is \d\.\d+ but its gradient is not finite, on blocks \[.*last good checkpoint is .*"
    with pytest.raises(HfpatchError, match=rf"{message}checkpoints/step-00000002; .*on_bad_loss=skip"):
        run(model, tmp_path, save_every=2, max_grad_norm=clip, on_bad_loss="stop")
    assert all(torch.isfinite(value).all() for value in trainables(model).values())
    assert same(trainables(model), load(tmp_path, 2))
    assert len(metrics_of(tmp_path)) == 2


def test_early_stopping_ends_with_the_best_weights_and_resumes_to_its_end(patched, tmp_path):
    held_out = make_blocks(documents=6, seed=5)
    options = {"held_out": held_out, "patience": 2, "keep_best": True}
    options |= {"evaluate_every": 1, "lr": 2.0, "warmup_steps": 0}
    model, again = patched(), patched()
    result = run(model, tmp_path, **options)
    measured = [line["eval_loss"] for line in metrics_of(tmp_path)[1:]]  # the first is of step 0
    best = measured.index(min(measured)) + 1
    assert result.stopped_early
    assert result.steps == len(measured) == best + 2 < STEPS
    assert (result.best_step, result.best_eval_loss) == (best, min(measured))
    assert same(trainables(model), load(tmp_path, best))
    repeated = run(again, tmp_path, on_step=lambda record: pytest.fail("trained again"), **options)
    assert same(trainables(model), trainables(again))
    assert repeated.to_json() | {"peak_memory_bytes": 0} == result.to_json() | {"peak_memory_bytes": 0}
