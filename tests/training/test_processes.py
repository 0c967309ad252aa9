"""Several processes: DDP and FSDP2 over gloo, a process or a machine that dies, and a port that is taken."""

import json
import os
import shutil
import signal
import time
from functools import partial

import forked
import pytest
import torch
from families import make_model, make_tokens
from launched import PROGRAM, TESTS, free_port, losses, saved
from safetensors.torch import load_file
from train_on_processes import STEPS, train
from training_blocks import metrics_of, numbers_of

from hfpatch import load_patch
from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import load_recipe
from hfpatch.runs import compare
from hfpatch.runs import train as run_train
from hfpatch.training import processes

CONFIG = TESTS.parent / "docs" / "accelerate" / "multi-node.yaml"


def environment_of_tests():
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


SCRATCH = {
    "fused": {"path": "nonlinear", "fused": True},
    "weight": {"path": "nonlinear", "anchor": "weight"},
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Train with one process and each accumulation here, then everything that needs two processes in one launch.

    Return the folder of all runs, how the launch ended, and its seconds after the last whole step of the last scenario,
    in which a process dies.
    """
    root = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_AUTO_WRAP_POLICY", "FSDP_RESHARD_AFTER_FORWARD"):
            patched.setenv(name, "false")
        for micro in (4, 2, 1):
            train(root / f"one-{micro}", {"micro_batch_size": micro, "save_every": 3, "keep_checkpoints": 2})
        scenarios = {
            "ddp-2": {"micro_batch_size": 2},
            "ddp-1": {"micro_batch_size": 1, "save_every": 3, "keep_checkpoints": 2},
            "ddp-resumed": {"save_every": 3},
            "ddp-best": {"keep_best": True, "patience": 1, "evaluate_every": 1},
            "fsdp-2": {"fsdp": True, "micro_batch_size": 2, "save_every": 3, "keep_checkpoints": 2},
            "fsdp-1": {"fsdp": True, "micro_batch_size": 1},
            "fsdp-resumed": {"fsdp": True, "save_every": 3},
            "fsdp-skipped": {"fsdp": True, "on_bad_loss": "skip", "gradient_checkpointing": True},
            "half-ddp": {"dtype": "bfloat16"},
            "half-fsdp": {"fsdp": True, "dtype": "bfloat16"},
        }
        train(root / "one-stack", {"stack": True, "steps": 2})
        scenarios["fsdp-stack"] = {"fsdp": True, "stack": True, "steps": 2, "micro_batch_size": 1}
        scenarios["fsdp-stack"] |= {"gradient_checkpointing": True}
        for kind, query in SCRATCH.items():
            train(root / f"one-{kind}", {"query": query, "diagnose_every": 3})
            for name, values in {"ddp": {"micro_batch_size": 1}, "fsdp": {"fsdp": True}}.items():
                scenarios[f"{name}-{kind}"] = {"query": query, "diagnose_every": 3, **values}
        for name, values in {"ddp": {}, "fsdp": {"fsdp": True}}.items():
            scenarios[f"{name}-diverged"] = {"query": SCRATCH["fused"], "spoil": 4, "diagnose_every": 3, **values}
        for name in ("ddp-resumed", "fsdp-resumed"):  # begun by one process, which got as far as step 3
            shutil.copytree(root / "one-4", root / name)
            shutil.rmtree(root / name / "checkpoints" / "step-00000006")
        scenarios["killed"] = {"kill": 3, "save_every": 1}  # the last one, since it ends the launch
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        environment = {**environment_of_tests(), "HF_HUB_OFFLINE": "1"}
        ended = forked.python([*command, str(PROGRAM), str(root), json.dumps(scenarios)], env=environment)
        last = root / "killed" / "metrics.jsonl"
        assert last.exists(), ended.stderr[-4000:]  # every other scenario came to its end
        seconds = time.time() - last.stat().st_mtime
        for name in ("ddp-1", "fsdp-2"):  # and the other way about
            shutil.copytree(root / name, root / f"{name}-one")
            shutil.rmtree(root / f"{name}-one" / "checkpoints" / "step-00000006")
            train(root / f"{name}-one", {"save_every": 3})
    return root, ended, seconds


@pytest.fixture(scope="module")
def runs(launched):
    return launched[0]


RUNS = [
    "one-2", "one-1", "ddp-2", "ddp-1", "ddp-resumed", "ddp-1-one", "fsdp-2", "fsdp-1", "fsdp-resumed", "fsdp-2-one",
    "fsdp-skipped",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_processes_and_accumulation_change_nothing_but_rounding(runs, name):
    assert losses(runs / name) == pytest.approx(losses(runs / "one-4"), rel=1e-5)
    assert losses(runs / name, "eval_loss") == pytest.approx(losses(runs / "one-4", "eval_loss"), rel=1e-5)
    torch.testing.assert_close(saved(runs / name), saved(runs / "one-4"), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["half-ddp", "half-fsdp"])
def test_a_base_in_bf16_is_cut_with_its_float32_trainables(runs, name):
    assert losses(runs / name) == pytest.approx(losses(runs / "one-4"), rel=2e-2)
    assert losses(runs / name) != losses(runs / "one-4")
    assert {value.dtype for value in saved(runs / name).values()} == {torch.float32}


@pytest.mark.slow
def test_the_runs_were_what_they_claim_to_be(runs):
    facts = {name: json.loads((runs / name / "result.json").read_text()) for name in ["one-4", *RUNS]}
    for name, fact in facts.items():
        assert fact["processes"] == (1 if name.startswith("one") or name.endswith("-one") else 2), name
        assert ("DTensor" in fact["kinds"]) is (name.startswith("fsdp") and not name.endswith("-one")), name
        assert fact["update_survival"]["all"] == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp-2", "fsdp-1", "fsdp-resumed"])
def test_the_saved_adapter_is_what_was_trained(runs, name):
    tokens = make_tokens()
    alone, several = (load_patch(make_model("gpt_neox"), runs / run / "patch") for run in ("one-4", name))
    plain = make_model("gpt_neox")(tokens).logits
    assert not torch.allclose(several(tokens).logits, plain, rtol=1e-2)
    torch.testing.assert_close(several(tokens).logits, alone(tokens).logits, rtol=1e-3, atol=1e-4)
    trained = load_file(runs / name / "checkpoints" / "step-00000006" / "trainable.safetensors")
    on_disk = saved(runs / name)
    assert sorted(value.sum().item() for value in trained.values()) == sorted(v.sum().item() for v in on_disk.values())
    assert sum(value.numel() for value in on_disk.values()) == 2 * (2 * 32 * 40 + 32 * 32)


@pytest.mark.slow
def test_a_stack_of_further_methods_is_the_same_cut_in_pieces(runs):
    """Output gate, nonlinear LoRA, value residual, parallel adapter, LoReFT and Canon, with recomputed blocks."""
    several, alone = runs / "fsdp-stack", runs / "one-stack"
    for key in ("loss", "eval_loss"):
        assert losses(several, key, steps=2) == pytest.approx(losses(alone, key, steps=2), rel=1e-5)
    files = sorted(path.relative_to(alone) for path in alone.glob("patch/*/adapter_model.safetensors"))
    assert len(files) == 6
    for path in files:
        torch.testing.assert_close(load_file(several / path), load_file(alone / path), rtol=1e-3, atol=1e-5)
    facts = json.loads((several / "result.json").read_text())
    assert ("DTensor" in facts["kinds"], facts["processes"]) == (True, 2)
    assert facts["update_survival"]["all"] == pytest.approx(1.0)


@pytest.mark.slow
def test_early_stopping_and_the_best_weights_are_agreed_on(runs):
    fact = json.loads((runs / "ddp-best" / "result.json").read_text())
    lines = metrics_of(runs / "ddp-best")
    measured = [line["eval_loss"] for line in lines if line["step"]]
    assert fact["best_eval_loss"] == min(measured)
    assert fact["best_step"] == measured.index(min(measured)) + 1
    best = load_file(runs / "ddp-best" / "checkpoints" / f"step-{fact['best_step']:08d}" / "trainable.safetensors")
    on_disk = saved(runs / "ddp-best")
    assert sorted(v.sum().item() for v in best.values()) == sorted(v.sum().item() for v in on_disk.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCRATCH)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_pretraining_is_the_same_on_several_processes(runs, name, kind):
    several, alone = runs / f"{name}-{kind}", runs / f"one-{kind}"
    assert numbers_of(several) == pytest.approx(numbers_of(alone), rel=1e-4, abs=1e-6)
    assert len(numbers_of(alone)) == STEPS + 3 + 3 * 2 * 2
    models = [load_file(folder / "model" / "model.safetensors") for folder in (several, alone)]
    torch.testing.assert_close(*models, rtol=1e-3, atol=3e-5)
    facts = json.loads((several / "result.json").read_text())
    assert (facts["processes"], facts["diverged_step"]) == (2, None)
    assert ("DTensor" in facts["kinds"]) is (name == "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_loss_that_is_nan_on_one_process_ends_the_run_on_all(runs, name):
    folder = runs / f"{name}-diverged"
    facts = json.loads((folder / "result.json").read_text())
    assert (facts["diverged_step"], facts["steps"], facts["processes"]) == (4, 4, 2)
    lines = metrics_of(folder)
    assert [("loss" in line) for line in lines] == [False, True, True, True, False]
    steps = [line["step"] for line in metrics_of(folder, "diagnostics")]
    assert steps == [0, 0, 3, 3, 4, 4]
    assert not (folder / "model").exists()


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_and_is_named(launched):
    root, ended, seconds = launched
    assert ended.returncode != 0
    assert seconds < 60
    assert "rank      : 1" in ended.stderr
    assert "SIGKILL" in ended.stderr
    assert (root / "killed" / "checkpoints").exists()
    assert not (root / "killed" / "patch").exists()


def test_without_a_launcher_an_error_is_not_hidden(monkeypatch):
    def fail(**_):
        raise RuntimeError("EADDRINUSE")

    monkeypatch.setattr(processes, "PartialState", fail)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        processes.start_processes()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HfpatchError, match="port is in use"):
        processes.start_processes()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_a_launcher_that_asks_for_mixed_precision_is_refused_before_anything_runs(tmp_path, monkeypatch, precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    recipe = load_recipe("quickstart", ["training.autocast=bfloat16"] if precision == "bf16" else [])
    for start in (compare, partial(run_train, method="lora")):
        with pytest.raises(HfpatchError, match=rf"mixed precision \({precision}\), and the recipe's training.autocast"):
            start(recipe, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as accelerate launch says it
    processes.start_processes()


def launch_machine(rank, port, folder, root, scenarios):
    """Start what is typed on one machine: the file of docs/ with two processes in place of sixteen GPUs."""
    folder.mkdir()
    where = ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    command = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIG), "--num_processes", "2"]
    environment = {**environment_of_tests(), "CUDA_VISIBLE_DEVICES": ""}
    return forked.start([*command, *where, str(PROGRAM), str(root), json.dumps(scenarios)], env=environment, cwd=folder)


@pytest.mark.slow
def test_a_machine_dies_and_the_other_goes_on_alone(tmp_path):
    root = tmp_path / "shared"
    options = {"micro_batch_size": 1, "save_every": 2, "keep_checkpoints": 3}
    scenarios = {"whole": options, "killed": {**options, "kill": 10}}  # in the second pass of step 5
    port = free_port()
    machines = [launch_machine(rank, port, tmp_path / f"machine-{rank}", root, scenarios) for rank in (0, 1)]
    ended = [machine.wait(timeout=400) for machine in machines]
    assert [process.returncode for process in ended] == [1, 1], ended
    assert f"exitcode  : -{signal.SIGKILL.value}" in ended[1].stderr
    facts = json.loads((root / "whole" / "result.json").read_text())
    assert facts["processes"] == 2
    assert not (root / "killed" / "result.json").exists()
    assert sorted(path.name for path in (root / "killed" / "checkpoints").glob("step-*"))[-1] == "step-00000004"
    before = (root / "killed" / "metrics.jsonl").read_text().splitlines()[:4]
    train(root / "killed", options)  # one machine fewer
    assert (root / "killed" / "metrics.jsonl").read_text().splitlines()[:4] == before  # these were not repeated
    train(root / "one", options)
    for name in ("whole", "killed"):
        assert len(losses(root / name)) == STEPS
        assert losses(root / name) == pytest.approx(losses(root / "one"), rel=1e-5)
        torch.testing.assert_close(saved(root / name), saved(root / "one"), rtol=1e-3, atol=1e-5)
