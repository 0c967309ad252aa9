"""Workers that are tasks of Ray: ``--ray``, on this machine or on a cluster."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from hfpatch.errors import HfpatchError, first_line
from hfpatch.runs.engines.processes import room_on
from hfpatch.runs.engines.settings import LOCAL, EngineSettings
from hfpatch.runs.engines.work import Job, Queue, work
from hfpatch.support.signals import sigterm_kept

CONNECT_S = 10.0
"""How long an address may take to answer."""
PACKAGES = ("hfpatch", "torch", "transformers", "peft", "ray")
SEEN_S = 5.0
"""How long a file may take to be seen from another machine, which network file systems may remember as absent."""
STORE_BYTES = 80_000_000
"""Ray's memory for objects on this machine: jobs are all that is sent."""
_PASSED_ON = ("TRANSFORMERS_", "HF_HUB_", "DATASETS_VERBOSITY", "HF_DATASETS_", "TOKENIZERS_", "HFPATCH_MATMUL")


class RayTasks:
    """Tasks that each have the devices of one run for as long as the command lasts, so that models stay loaded.

    Ray decides on which machines they are. Those for which no devices are free wait, and begin as soon as a machine
    joins.
    """

    def __init__(self, settings: EngineSettings) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a run without GPUs sees none
        try:
            import ray
        except ImportError as error:
            raise HfpatchError("--ray needs Ray, which is not installed; pip install 'hfpatch[ray]'") from error
        self.ray: ModuleType = ray
        self.settings, self._joined = settings, False
        self.most = settings.jobs  # how many workers there may be; None for one for every ready unit
        self.cpus = settings.cpus_per_run or settings.processes
        self.threads = max(1, self.cpus // settings.processes)
        self._tasks: dict[int, Any] = {}

    def connect(self) -> None:
        """Start Ray on this machine, or join the cluster at an address that answers.

        Raises:
            HfpatchError: if it cannot be joined, or no machine has the devices that the runs ask for.
        """
        ray, address = self.ray, str(self.settings.ray)
        where, advice = f"--ray {address}", "start the cluster with ray start"
        if not ray.is_initialized():
            common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address not in (LOCAL, "auto"):
                host, _, port = address.removeprefix("ray://").rpartition(":")
                if not host or not port.isdigit():
                    raise HfpatchError(f"{where}: write the address as HOST:PORT, ray://HOST:PORT or auto")
                try:
                    socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
                except OSError as error:
                    reason = error.strerror or str(error)
                    raise HfpatchError(f"{where}: cannot be reached ({reason}); {advice}") from error
            with sigterm_kept():
                if address == LOCAL:
                    ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **common)
                else:
                    try:
                        ray.init(address=address, **common)
                    except (ConnectionError, RuntimeError, ValueError) as error:
                        reason = " ".join(str(error).split())
                        raise HfpatchError(f"{where}: cannot be joined ({reason}); {advice}") from error
            self._joined = True
        for name, key, asked in (("gpus", "GPU", self.gpus), ("cpus", "CPU", float(self.cpus))):
            most = max((node.get(key, 0.0) for node in self._nodes()), default=0.0)
            if asked > most:
                raise HfpatchError(
                    f"--{name}-per-run {asked:g}: no machine of the cluster has so many (the most is {most:g}); ask "
                    "for fewer, or start a machine that has them"
                )
        if not any(self._fits(node) for node in self._nodes()):
            raise HfpatchError(
                f"--cpus-per-run {self.cpus} with --gpus-per-run {self.gpus:g}: no machine of the cluster has both; "
                "ask for fewer"
            )

    def room(self) -> int:
        """Return how many runs fit on the machines that are there now, or how many were asked for."""
        return self.most or max(1, sum(self._fits(node) for node in self._nodes()))

    def describe(self) -> str:
        """Return the number of machines, and the devices of a run."""
        nodes, gpus = len(self._nodes()), f" and {self.gpus:g} GPUs" if self.gpus else ""
        cores = f"{self.cpus} CPU core{'s' * (self.cpus > 1)}"
        where = "this machine" if self.settings.ray == LOCAL else f"{nodes} machine{'s' * (nodes > 1)}"
        return f"{self.room()} runs at a time on {where}, each on {cores}{gpus}, by Ray"

    def start(self, job: Job, seat: int, slot: int) -> None:
        """Submit a task, in a process of its own that ends with it."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": 0, "max_calls": 1}
        passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        if passed and self.settings.ray != LOCAL:  # on this machine they are inherited
            options["runtime_env"] = {"env_vars": passed}
        self._tasks[seat] = self.ray.remote(**options)(work_there).remote(job, seat, current_versions())

    def ended(self, seat: int) -> str | None:
        """Return how a worker has ended; None while it has not.

        Raises:
            HfpatchError: if its machine does not see the run folder or has other versions.
        """
        task = self._tasks[seat]
        if not self.ray.wait([task], timeout=0)[0]:
            return None
        try:
            refusal = self.ray.get(task)
        except Exception as error:  # whatever Ray raises where a process ends or cannot start
            return f"{type(error).__name__}: {first_line(error)}"
        if refusal is not None:
            raise HfpatchError(refusal)
        return "it has left"

    def end(self, seat: int) -> None:
        """End a worker at once, or let it not begin; without effect if it has ended."""
        with suppress(Exception):  # Ray may have lost it, or be gone itself
            self.ray.cancel(self._tasks.pop(seat), force=True)

    def close(self) -> None:
        """Leave the cluster, or end the one on this machine."""
        if self._joined:
            self.ray.shutdown()

    @property
    def gpus(self) -> float:
        """The GPUs of a run; one each where there are any."""
        if self.settings.gpus_per_run is not None:
            return self.settings.gpus_per_run
        return float(any(node.get("GPU") for node in self._nodes()))

    def _nodes(self) -> list[dict[str, float]]:
        """Return the resources of each living machine."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _fits(self, node: dict[str, float]) -> int:
        by_cpus = int(node.get("CPU", 0) // self.cpus)
        return min(by_cpus, room_on(int(node.get("GPU", 0)), self.gpus)) if self.gpus else by_cpus


def work_there(job: Job, seat: int, versions: Mapping[str, str]) -> str | None:
    """Work on a machine that sees the run folder and has the driver's versions; return what it lacks, or None."""
    node, deadline = socket.gethostname(), time.monotonic() + SEEN_S
    while not Queue(job.queue).is_open:
        if time.monotonic() > deadline:
            return (
                f"{job.plan.out}: cannot be seen from {node}; choose an --out on a file system that all machines mount "
                "under the same path, such as NFS"
            )
        time.sleep(0.2)
    differ = [
        f"{name} is {there or 'missing'} on {node} and {versions[name] or 'missing'} here"
        for name, there in current_versions().items()
        if there != versions[name]
    ]
    if differ:
        return f"versions differ: {'; '.join(differ)}; install the same on all machines"
    work(job, seat)
    return None


def current_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a number here; empty text for a missing one."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions
