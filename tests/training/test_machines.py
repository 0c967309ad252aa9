"""Two machines, each a launcher of its own on this one: one of them dies, and the other goes on alone."""

import json
import os
import signal

import forked
import pytest
import torch
from launched import PROGRAM, TESTS, free_port, losses, saved
from train_on_processes import STEPS, train

CONFIG = TESTS.parent / "docs" / "accelerate" / "multi-node.yaml"


def launch_machine(rank, port, folder, root, scenarios):
    """Start what is typed on one machine: the file of docs/ with two processes in place of sixteen GPUs."""
    folder.mkdir()
    where = ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    command = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIG), "--num_processes", "2"]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return forked.start([*command, *where, str(PROGRAM), str(root), json.dumps(scenarios)], env=environment, cwd=folder)


@pytest.mark.slow
def test_a_machine_dies_and_the_other_goes_on_alone(tmp_path):
    root = tmp_path / "shared"
    options = {"micro_batch_size": 1, "save_every": 2, "keep_checkpoints": 3}
    scenarios = {"whole": options, "killed": {**options, "kill": 10}}  # in the second pass of step 5
    port = free_port()
    machines = [launch_machine(rank, port, tmp_path / f"machine-{rank}", root, scenarios) for rank in (0, 1)]
    ended = [machine.wait(timeout=400) for machine in machines]
    assert [each.returncode for each in ended] == [1, 1], ended
    assert f"exitcode  : -{signal.SIGKILL.value}" in ended[1].stderr
    facts = json.loads((root / "whole" / "result.json").read_text())
    assert facts["processes"] == 2
    assert not (root / "killed" / "result.json").exists()
    assert sorted(path.name for path in (root / "killed" / "checkpoints").glob("step-*"))[-1] == "step-00000004"
    before = (root / "killed" / "metrics.jsonl").read_text().splitlines()[:4]
    train(root / "killed", {**options, "resume": True})  # one machine fewer
    assert (root / "killed" / "metrics.jsonl").read_text().splitlines()[:4] == before  # these were not repeated
    train(root / "one", options)
    for name in ("whole", "killed"):
        assert len(losses(root / name)) == STEPS
        assert losses(root / name) == pytest.approx(losses(root / "one"), rel=1e-5)
        expected = saved(root / "one")
        for key, value in saved(root / name).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-5)
