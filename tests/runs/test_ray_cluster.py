"""A cluster of several machines, simulated on this one: workers, drivers and a machine that die."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from runs.test_engines import (  # noqa: F401
    Log,
    _one_commit,
    assert_equal,
    goes_on_whoever_ends,
    recipe,
    straight_study,
    study,
)

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
