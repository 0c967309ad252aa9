"""DeepSpeed itself, ZeRO-2 and ZeRO-3, with two processes on CPUs; `make deepspeed` installs it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import PROGRAM, TESTS, free_port, losses, saved
from safetensors.torch import load_file
from train_on_processes import train

ENVIRONMENT = Path(f"{sys.prefix}-deepspeed")
PYTHON = ENVIRONMENT / "bin" / "python"
STAGES = (2, 3)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{ENVIRONMENT} does not exist; make deepspeed creates it"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train with one process here, and in one launch for each stage with two; the last run of a launch is refused.

    Return the folder of all runs, and the errors of each launch.
    """
    root = tmp_path_factory.mktemp("deepspeed")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_AUTO_WRAP_POLICY", "FSDP_RESHARD_AFTER_FORWARD"):
            patched.setenv(name, "false")
        train(root / "one", {"save_every": 3, "keep_checkpoints": 2})
        train(root / "one-stack", {"stack": True, "steps": 2})
    errors = {}
    for stage in STAGES:
        shutil.copytree(root / "one", root / f"{stage}-resumed")
        shutil.rmtree(root / f"{stage}-resumed" / "checkpoints" / "step-00000006")
        scenarios = {
            f"{stage}": {"micro_batch_size": 1, "keep_best": True},
            f"{stage}-stack": {"stack": True, "steps": 2, "micro_batch_size": 1, "gradient_checkpointing": True},
            f"{stage}-resumed": {"save_every": 3},
        }
        config = TESTS.parent / "docs" / "accelerate" / f"deepspeed-zero{stage}-cpu.yaml"
        command = [PYTHON, "-m", "accelerate.commands.launch", "--config_file", config]
        command += ["--main_process_port", str(free_port()), PROGRAM, root, json.dumps(scenarios)]
        environment = os.environ | {
            "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
            "TORCH_EXTENSIONS_DIR": str(ENVIRONMENT / "extensions"),  # it compiles an operation on first use
        }  # fmt: skip
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert (root / f"{stage}-stack" / "result.json").exists(), ended.stderr[-4000:]
        assert ended.returncode != 0
        errors[stage] = ended.stderr
    return root, errors


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_is_that_of_one_process(runs, stage):
    root, _ = runs
    for key in ("loss", "eval_loss"):
        assert losses(root / f"{stage}", key) == pytest.approx(losses(root / "one", key), rel=1e-6)
    torch.testing.assert_close(saved(root / f"{stage}"), saved(root / "one"), rtol=3e-4, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_so_is_a_stack_of_all_methods_with_checkpoints(runs, stage):
    root, _ = runs
    assert losses(root / f"{stage}-stack", steps=2) == pytest.approx(losses(root / "one-stack", steps=2), rel=1e-6)
    files = sorted((root / "one-stack").rglob("adapter_model.safetensors"))
    assert len(files) == 6
    for file in files:
        tensors = load_file(root / f"{stage}-stack" / file.relative_to(root / "one-stack"))
        torch.testing.assert_close(tensors, load_file(file), rtol=3e-4, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_the_parameters_were_cut_by_stage_3_alone(runs, stage):
    facts = json.loads((runs[0] / f"{stage}" / "result.json").read_text())
    assert facts["processes"] == 2
    assert ("ZeRO-3" in facts["kinds"]) is (stage == 3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_is_not_resumed(runs, stage):
    root, errors = runs
    assert f"{stage}-resumed/checkpoints/step-00000003: a run under DeepSpeed cannot be resumed" in errors[stage]
    assert (root / f"{stage}-resumed" / "metrics.jsonl").read_text() == (root / "one" / "metrics.jsonl").read_text()
