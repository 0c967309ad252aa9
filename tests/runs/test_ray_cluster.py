"""A cluster of several machines, simulated on this one: machines and drivers that die, and what is refused."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runs.test_engines import (  # noqa: F401
    Log,
    _no_report,
    assert_equal,
    goes_on_whoever_ends,
    recipe,
    straight_study,
    study,
)
from tiny_runs import refused

from hfpatch.errors import HfpatchError
from hfpatch.runs import compare
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.support.signals import sigterm_kept

TESTS = Path(__file__).parents[1]
STORE = {"object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose head works on nothing."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", path)
        patched.setenv("OMP_NUM_THREADS", "1")
        patched.setenv("RAY_raylet_start_wait_time_s", "180")  # on a busy machine
        patched.setenv("RAY_prestart_worker_first_driver", "0")  # a worker for each core, which nobody asked for
        patched.setenv("RAY_gcs_rpc_server_connect_timeout_s", "60")
        with sigterm_kept():
            made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **STORE})
        yield made
        made.shutdown()


@pytest.fixture
def machine(cluster):
    """Return a function that adds a machine to the cluster until the end of the test."""
    added = []

    def add(**options):
        with sigterm_kept():
            added.append(cluster.add_node(**{"num_cpus": 1, **STORE, **options}))
        return added[-1]

    yield add
    for node in added:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)


class KillNode(Log):
    """Kills the machine that a run is on, with all its processes, once the run has done some steps."""

    def __init__(self, run, cluster, folder):
        super().__init__()
        self.run, self.cluster, self.folder, self.kept, self.killed = run, cluster, folder, None, None

    def stepped(self, run, record):
        if run == self.run and record.step > 40 and self.killed is None:
            worker = next(int(node.rpartition(":")[2]) for name, _, node in self.nodes if name == run)
            raylet = psutil.Process(worker).parent()
            raylets = {node.all_processes["raylet"][0].process.pid: node for node in self.cluster.list_all_nodes()}
            self.killed = raylets[raylet.pid]
            for process in [*raylet.children(recursive=True), raylet]:
                process.send_signal(signal.SIGKILL)
            self.kept = (self.folder / "metrics.jsonl").read_text().splitlines()[:40]  # of the last checkpoint
            self.cluster.remove_node(self.killed, allow_graceful=False)


@pytest.mark.slow
def test_a_study_outlives_workers_drivers_and_a_machine(study, straight_study, tmp_path, cluster, machine):  # noqa: F811
    machine()
    options = "--ray", cluster.address, "--jobs", "1"
    goes_on_whoever_ends(study, straight_study, tmp_path / "out", signal.SIGTERM, *options)

    # A command with two machines, one of which dies
    machine()
    out = tmp_path / "again"
    log = KillNode("two · seed 0", cluster, out / "runs" / "two" / "seed-0")
    compare(study, out, engine=EngineSettings(ray=cluster.address), progress=log)
    assert log.opened_with.startswith("2 runs at a time on ")
    assert log.killed is not None
    trained = sorted(run for run, action, _ in log.nodes if action == "train")
    assert trained == ["one · seed 0", "two · seed 0", "two · seed 0"]
    lines = (out / "runs" / "two" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert lines[:40] == log.kept  # with their times: they were not computed again
    assert_equal(out, straight_study)
    assert not list((out / ".locks").iterdir())


class Count(Log):
    """Notes how many units are at work at a time."""

    def __init__(self):
        super().__init__()
        self.at_work, self.most = set(), 0

    def placed(self, run, action, node):
        super().placed(run, action, node)
        self.at_work.add(run)
        self.most = max(self.most, len(self.at_work))

    def left(self, run, units, error=None):
        super().left(run, units, error)
        self.at_work.discard(run)


@pytest.mark.slow
def test_fractions_of_gpus_and_machines_that_lack_something(study, tmp_path, cluster, machine):  # noqa: F811
    machine(num_cpus=4, num_gpus=1)  # declared; there is none

    def run(out, **options):
        log = Count()
        compare(study, out, engine=EngineSettings(ray=cluster.address, **options), progress=log)
        return log

    with pytest.raises(
        HfpatchError, match=r"^no machine of the cluster has .* 4 GPUs for a run \(there are machines of .* and 1 GPUs"
    ):
        run(tmp_path / "none", gpus_per_run=4)
    assert not (tmp_path / "none").exists()
    three = study.model_copy(update={"variants": dict.fromkeys(("one", "two", "three"), study.variants["one"])})
    log = Count()
    compare(three, tmp_path / "half", engine=EngineSettings(ray=cluster.address, gpus_per_run=0.5), progress=log)
    assert re.match(r"2 runs at a time on \d machines, each on 1 CPU core and 0.5 GPUs", log.opened_with)
    assert (log.most, len(log.done)) == (2, 3)

    other = tmp_path / "other" / "transformers-1.2.3.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 1.2.3\n")
    changed = {"PYTHONPATH": os.pathsep.join([str(other.parent), os.environ["PYTHONPATH"]])}
    node = machine(num_cpus=8, env_vars=changed)
    with pytest.raises(HfpatchError, match=r"^versions differ: transformers is 1.2.3 on .* and .* here"):
        run(tmp_path / "differ", cpus_per_run=8, gpus_per_run=0)
    cluster.remove_node(node, allow_graceful=False)

    # A machine on which the run folder is another file system, where this system lets us
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a machine that does not see the folder needs a mount namespace, which is not allowed here")
    out = tmp_path / "unseen"
    out.mkdir()
    private = f"mount -t tmpfs tmpfs {out} && exec ray start --address {cluster.address} --num-cpus 9 --block"
    ray = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with (tmp_path / "node.log").open("w") as log_file:
        command = ["unshare", "--mount", "sh", "-c", private]
        node = subprocess.Popen(command, env=ray, start_new_session=True, stdout=log_file, stderr=log_file)
    try:
        deadline, message = time.monotonic() + 90, "no machine"
        while "no machine" in message:  # until it has joined
            assert time.monotonic() < deadline, (tmp_path / "node.log").read_text()
            message = refused(run, out, cpus_per_run=9, gpus_per_run=0)
        assert message.startswith(f"{out}: cannot be seen from {socket.gethostname()}; choose")
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
