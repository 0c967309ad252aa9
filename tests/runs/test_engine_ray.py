"""What `--ray` says where Ray, a cluster or its devices are not there."""

import socket
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from tiny_runs import refused

from hfpatch.runs.engines import make_engine
from hfpatch.runs.engines.settings import EngineSettings


def test_ray_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'hfpatch[ray]'" in refused(lambda: make_engine(EngineSettings(ray="local")))


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
    with closing(make_engine(EngineSettings(ray="auto", **options))) as engine:
        engine.connect()
        assert engine.at_once == room


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus_per_run": 8.0}, "--gpus-per-run 8: no machine of the cluster has so many (the most is 4)"),
        ({"cpus_per_run": 65}, "--cpus-per-run 65: no machine of the cluster has so many (the most is 64)"),
        ({"cpus_per_run": 9, "gpus_per_run": 1.0}, "no machine of the cluster has both"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_devices_that_no_machine_has_are_refused(options, message):
    assert message in refused(make_engine(EngineSettings(ray="auto", **options)).connect)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_that_does_not_answer_is_refused_at_once(cluster, prefix, monkeypatch):
    cluster.is_initialized = lambda: False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{prefix}127.0.0.1:{free.getsockname()[1]}"
    assert f"--ray {address}: cannot be reached (Connection refused)" in refused(
        make_engine(EngineSettings(ray=address)).connect
    )
    assert "write the address as" in refused(make_engine(EngineSettings(ray=f"{prefix}head:")).connect)


def test_no_running_ray_is_one_line(cluster):
    cluster.is_initialized = lambda: False

    def init(**_):
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify one")

    cluster.init = init
    message = refused(make_engine(EngineSettings(ray="auto")).connect)
    assert "--ray auto: cannot be joined (Could not find any running Ray instance. Please specify one)" in message
