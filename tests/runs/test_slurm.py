"""The Slurm script of the documentation, run by a real slurmctld on this machine, where Slurm is installed."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from runs.test_engines import recipe  # noqa: F401

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "cluster" / "slurm.sbatch"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def test_the_script_is_bash():
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    subprocess.run(["bash", "-n", SCRIPT], check=True)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Start Slurm with one node of two CPUs; the result runs a command of it."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("Slurm is not installed (Debian: slurm-wlm)")
    if os.getuid() != 0:
        pytest.skip("slurmd must be started by root")
    host = socket.gethostname().partition(".")[0]
    (tmp_path / "state").mkdir()
    (tmp_path / "spool").mkdir()
    config = tmp_path / "slurm.conf"
    with socket.socket() as one, socket.socket() as other:  # two free ports
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = [bound.getsockname()[1] for bound in (one, other)]
    config.write_text(CONFIG.format(host=host, folder=tmp_path, ports=ports))
    monkeypatch.setenv("SLURM_CONF", str(config))
    started = [subprocess.Popen(["slurmctld", "-D"], stderr=subprocess.DEVNULL)]
    started += [subprocess.Popen(["slurmd", "-D"], stderr=subprocess.DEVNULL)]

    def run(*command):
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        deadline = time.monotonic() + 60
        while "idle" not in run("sinfo", "--noheader", "--format=%T").stdout:
            if time.monotonic() > deadline:
                pytest.skip("Slurm did not start within a minute")
            time.sleep(0.5)
        yield run
        run("scancel", "--user=root")
        deadline = time.monotonic() + 60
        while run("squeue", "--noheader").stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.5)
    finally:
        for daemon in started:
            daemon.terminate()
        for daemon in started:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=20)
            daemon.kill()


@pytest.mark.slow
def test_the_script_runs_a_comparison(slurm, recipe, tmp_path):  # noqa: F811
    pytest.importorskip("ray")
    small = recipe.model_copy(update={"tuning": None})
    (tmp_path / "recipe.yaml").write_text(small.to_yaml().replace("tuning: null\n", ""))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "hfpatch"  # the checkout's, whether it is installed or not
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hfpatch "$@"\n')
    program.chmod(0o755)
    paths = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    patient = "RAY_raylet_start_wait_time_s=180"  # on a busy machine
    environment = f"ALL,PATH={os.pathsep.join(paths)},PYTHONPATH={ROOT},OMP_NUM_THREADS=1,{patient}"
    asked = ["--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2", "--time=9", f"--output={tmp_path}/job.log"]
    command = [SCRIPT, tmp_path / "recipe.yaml", "--out", tmp_path / "out", "training.seeds=[0]"]
    done = slurm("sbatch", "--wait", f"--export={environment}", *asked, *map(str, command))
    log = (tmp_path / "job.log").read_text() if (tmp_path / "job.log").exists() else ""
    assert done.returncode == 0, done.stderr + log[-3000:]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["complete"]
    assert "by Ray" in log
