"""What `--ray` says where Ray, a cluster or its devices are not there."""

import os
import re
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from tiny_runs import refused

from hfpatch.__main__ import main
from hfpatch.errors import HfpatchError
from hfpatch.runs.engines import ray
from hfpatch.runs.engines.driver import open_engine
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.support.environment import CPU_ONLY


def opened(**options):
    with open_engine(EngineSettings(**options)) as engine:
        return int(engine.workers.description.split()[0])  # runs at a time


def test_ray_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'hfpatch[ray]'" in refused(opened, ray="local")


@pytest.fixture
def cluster(monkeypatch):
    """A stand-in for Ray with a cluster of two machines."""
    machines = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 64.0}, {"CPU": 64.0, "GPU": 64.0}]
    nodes = [{"Alive": number < 2, "Resources": resources} for number, resources in enumerate(machines)]
    fake = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes)
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, 4),
        ({"jobs": 9}, 9),
        ({"gpus_per_run": 2.0}, 2),
        ({"gpus_per_run": 0.5}, 8),
        ({"gpus_per_run": 0.3}, 8),  # 12 by GPUs, and 8 cores
        ({"gpus_per_run": 0.0}, 72),
        ({"gpus_per_run": 0.0, "cpus_per_run": 16}, 4),
        ({"cpus_per_run": 4}, 2),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_as_many_runs_at_a_time_as_have_room(options, room):
    assert opened(ray="auto", **options) == room


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"gpus_per_run": 8.0}, "8 CPU cores and 8 GPUs"),
        ({"cpus_per_run": 65, "gpus_per_run": 0.0}, "65 CPU cores"),
        ({"cpus_per_run": 9, "gpus_per_run": 1.0}, "9 CPU cores and 1 GPUs"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_devices_that_no_machine_has_are_refused(options, devices):
    there = "there are machines of 64 cores and 0 GPUs, 8 cores and 4 GPUs"
    assert "--processes-per-run 2: a run has one GPU here" in refused(opened, ray="auto", processes_per_run=2)
    assert f"no machine of the cluster has {devices} for a run ({there})" in refused(opened, ray="auto", **options)


def test_ray_on_this_machine_inherits_nothing_of_a_driver_that_leaves_the_devices(cluster, monkeypatch):
    monkeypatch.delenv(CPU_ONLY, raising=False)
    inherited = []
    cluster.is_initialized, cluster.shutdown = lambda: False, lambda: None
    cluster.init = lambda **_: inherited.append(os.environ.get(CPU_ONLY))
    PartialState()
    PartialState._shared_state["device"] = torch.device("cuda")  # until the engine resets it
    with open_engine(EngineSettings(ray="local")) as engine:
        assert (os.environ[CPU_ONLY], PartialState().device.type, engine.measures) == ("true", "cpu", False)
    assert inherited == [None]
    assert CPU_ONLY not in os.environ


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_that_does_not_answer_is_refused_at_once(cluster, prefix, monkeypatch):
    cluster.is_initialized = lambda: False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{prefix}127.0.0.1:{free.getsockname()[1]}"
    assert re.search(rf"^--ray {address}: cannot be joined \(.*Connection refused\)", refused(opened, ray=address))


@pytest.mark.parametrize(
    "address",
    [
        "''",
        "abc",
        "head:",
        "head:abc",
        "head:0",
        "head:65536",
        ":6379",
        "::1:6379",
        "[head:6379",
        "http://head:6379",
        "ray://a:1,b:2",
    ],
)
def test_a_bad_address_is_one_line_with_what_is_expected(address, tmp_path, capsys):
    assert main(["compare", "quickstart", "--ray", address.strip("'"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        f"hfpatch: error: --ray {address}: write the address of a cluster as HOST:PORT, ray://HOST:PORT or auto, or "
        "leave it out for Ray on this machine\n"
    )
    assert not (tmp_path / "out").exists()


def test_the_address_of_an_ipv6_host_is_in_brackets(cluster):
    cluster.is_initialized = lambda: False
    assert "[::1]:9: cannot be joined ([Errno" in (message := refused(opened, ray="[::1]:9"))
    assert "Name or service" not in message


def test_no_running_ray_is_one_line(cluster):
    cluster.is_initialized = lambda: False

    def init(**_):
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify one")

    cluster.init = init
    message = refused(opened, ray="auto")
    assert "--ray auto: cannot be joined (Could not find any running Ray instance. Please specify one)" in message


def test_a_machine_that_does_not_see_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "SEEN_S", 0.0)
    job = SimpleNamespace(queue=tmp_path / "absent", plan=SimpleNamespace(out=tmp_path))
    said = refused(ray.work_there, job, 0)
    assert said.startswith(f"{tmp_path}: cannot be seen from {socket.gethostname()}; choose an --out")

    def get(_):  # as Ray does
        error = RuntimeError("ray::work_there() (pid=3)")
        error.cause = HfpatchError(said)
        raise error

    answered = SimpleNamespace(wait=lambda *_, **__: ([None], []), get=get)
    assert ray.Task(answered, None).ended() == f"HfpatchError: {said}"
