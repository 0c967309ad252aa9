"""A cluster of several machines, simulated on this one: machines and drivers that die, and what is refused."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runs.test_engines import Log, _no_report, assert_equal, look_often, recipe, straight_study, study  # noqa: F401

from hfpatch.errors import HfpatchError
from hfpatch.runs import pretrain_study
from hfpatch.runs.engines.job import Job
from hfpatch.runs.engines.ray import NodeReport, Token, check_nodes, current_versions, inspect_node, shared_token
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.locks import new_holder
from hfpatch.support.signals import sigterm_kept

TESTS = Path(__file__).parents[1]
STORE = {"object_store_memory": 80_000_000}
SECONDS = 30
"""Within these a command that was interrupted has ended all its workers, on a busy machine."""
DRIVER = """
import json, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs import pretrain_study
from hfpatch.runs.engines import parallel
from hfpatch.runs.engines.settings import EngineSettings
from runs.test_engines import Tell
parallel.POLL_S = 0.02
study, out, address = StudyRecipe.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
tell = Tell(Path(sys.argv[4]), kill_after=None, tell_after=20)
pretrain_study(study, out, resume=True, engine=EngineSettings(ray=address, jobs=1), progress=tell)
"""


def test_every_machine_must_see_the_folder_and_have_the_same_versions(tmp_path):
    with shared_token(tmp_path) as token:
        here = inspect_node(token)
        assert here == NodeReport(socket.gethostname(), True, current_versions())
        check_nodes([here, here], token, current_versions())
        elsewhere = [Token(tmp_path / "other" / token.path.name, token.text), Token(token.path, "another text")]
        assert [inspect_node(each, wait_s=0.0).sees_folder for each in elsewhere] == [False, False]
    assert not list(tmp_path.iterdir())
    assert set(here.versions) == {"python", "hfpatch", "torch", "transformers", "peft", "ray"}
    blind = [here, NodeReport("node-2", False, {}), NodeReport("node-3", False, {})]
    with pytest.raises(HfpatchError, match=rf"^{tmp_path}: cannot be seen from node-2, node-3; choose an --out on a"):
        check_nodes(blind, token, here.versions)
    older = NodeReport("node-2", True, {**here.versions, "torch": "2.9.0", "peft": ""})
    with pytest.raises(HfpatchError, match=r"^versions differ: torch is 2.9.0 on node-2 and .*; peft is missing on"):
        check_nodes([here, older], token, here.versions)


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
    for each in added:
        if each in cluster.list_all_nodes():
            cluster.remove_node(each, allow_graceful=False)


class KillNode(Log):
    """Kills the machine that a run is on, with all its processes, once the run has done some steps."""

    def __init__(self, run, cluster, folder):
        super().__init__()
        self.run, self.cluster, self.folder, self.kept, self.killed = run, cluster, folder, None, None

    def stepped(self, run, record):
        if run == self.run and record.step > 20 and self.killed is None:
            worker = next(int(node.rpartition(":")[2]) for name, _, node in self.nodes if name == run)
            place = psutil.Process(worker).ppid()
            raylets = {node.all_processes["raylet"][0].process.pid: node for node in self.cluster.list_all_nodes()}
            self.killed = raylets[place]
            for process in [*psutil.Process(place).children(recursive=True), psutil.Process(place)]:
                process.send_signal(signal.SIGKILL)
            self.kept = (self.folder / "metrics.jsonl").read_text().splitlines()[:20]  # of the last checkpoint
            self.cluster.remove_node(self.killed, allow_graceful=False)


def interrupted(study, out, cluster, number):  # noqa: F811
    """Start a command on the cluster, send it a signal in the middle of a training; return the exit code."""
    told = out.with_suffix(".told")
    told.unlink(missing_ok=True)
    arguments = [study.model_dump_json(), str(out), cluster.address, str(told)]
    with (out.parent / "driver.log").open("w+") as said:
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], stdout=said, stderr=said)
        deadline = time.monotonic() + 180
        while not (told.exists() and told.read_text()) and time.monotonic() < deadline and driver.poll() is None:
            time.sleep(0.02)
        assert told.exists(), (out.parent / "driver.log").read_text()[-3000:]
        worker = psutil.Process(int(told.read_text().split()[0]))
        driver.send_signal(number)
        begin = time.monotonic()
        code = driver.wait(timeout=SECONDS)
        worker.wait(timeout=max(1.0, SECONDS - (time.monotonic() - begin)))
    return code


@pytest.mark.slow
@pytest.mark.usefixtures("look_often")
def test_a_study_outlives_its_drivers_and_a_machine(study, straight_study, tmp_path, cluster, machine):  # noqa: F811
    machine()
    out = tmp_path / "out"
    checkpoints = out / "runs" / "one" / "seed-0" / "checkpoints"

    # Two drivers end, and each time the worker with them
    assert interrupted(study, out, cluster, signal.SIGINT) != 0
    first = max(int(path.name[5:]) for path in checkpoints.glob("step-*"))
    assert not (out / ".locks").exists()
    assert interrupted(study, out, cluster, signal.SIGKILL) == -signal.SIGKILL
    assert 0 < first <= max(int(path.name[5:]) for path in checkpoints.glob("step-*")) < 300

    # The next driver goes on with two machines, one of which dies
    machine()
    log = KillNode("two · seed 0", cluster, out / "runs" / "two" / "seed-0")
    pretrain_study(study, out, resume=True, engine=EngineSettings(ray=cluster.address), progress=log)
    assert log.opened_with.startswith("2 runs at a time on ")
    assert log.killed is not None
    assert sorted(run for run, _, _ in log.nodes) == ["one · seed 0", "two · seed 0", "two · seed 0"]
    lines = (out / "runs" / "two" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert lines[:20] == log.kept  # with their times: they were not computed again
    assert_equal(out, straight_study)
    assert not (out / ".locks").exists()


@pytest.mark.slow
def test_fractions_of_gpus_and_machines_that_lack_something(study, tmp_path, cluster, machine, monkeypatch):  # noqa: F811
    from hfpatch.runs.engines.ray import RayWorkers

    machine(num_cpus=4, num_gpus=1)  # declared; there is none
    job = Job(recipe=study, out=tmp_path, part=None, holder=new_holder(), folder=tmp_path)
    with pytest.raises(HfpatchError, match=r"^--gpus-per-run 4: no machine .* \(the most is 1\)"):
        pretrain_study(study, tmp_path / "out", engine=EngineSettings(ray=cluster.address, gpus_per_run=4))
    assert not (tmp_path / "out").exists()
    workers = RayWorkers(EngineSettings(ray=cluster.address, gpus_per_run=0.5))
    workers.connect()
    try:
        assert workers.room() == 2
        workers.check(job)
        made = [workers.make(job, number) for number in range(3)]
        futures = [worker.place for worker in made]
        nodes = [future.result(timeout=120).node for future in futures[:2]]
        assert nodes == [socket.gethostname()] * 2
        with pytest.raises(TimeoutError):
            futures[2].result(timeout=2)
        made[0].kill()  # and its half is free
        assert futures[2].result(timeout=120).node == socket.gethostname()
        for worker in made[1:]:
            worker.kill()
        other = tmp_path / "other" / "transformers-1.2.3.dist-info"
        other.mkdir(parents=True)
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 1.2.3\n")
        changed = {"PYTHONPATH": os.pathsep.join([str(other.parent), os.environ["PYTHONPATH"]])}
        node = machine(num_cpus=2, env_vars=changed)
        with pytest.raises(HfpatchError, match=r"^versions differ: transformers is 1.2.3 on .* and .* here"):
            workers.check(job)
        cluster.remove_node(node, allow_graceful=False)
        blind(workers, job, cluster.address)
    finally:
        workers.close()


def blind(workers, job, address):
    """Add a machine on which the run folder is another file system, where this system lets us."""
    private = f"mount -t tmpfs tmpfs {job.out} && exec ray start --address {address} --num-cpus 1 --block"
    ray = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a machine that does not see the folder needs a mount namespace, which is not allowed here")
    known = {node["NodeID"] for node in workers.ray.nodes()}
    log = Path(f"{job.out}.log")
    with log.open("w") as said:
        command = ["unshare", "--mount", "sh", "-c", private]
        node = subprocess.Popen(command, env=ray, start_new_session=True, stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + 90
        while known.issuperset(each["NodeID"] for each in workers.ray.nodes()):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        with pytest.raises(HfpatchError, match=f"^{job.out}: cannot be seen from {socket.gethostname()}"):
            workers.check(job)
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
