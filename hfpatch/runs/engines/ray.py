"""Workers that are actors of Ray: ``--ray``, on this machine or on a cluster whose machines are compared first."""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.job import Job, Outcome, Place
from hfpatch.runs.engines.processes import room_on
from hfpatch.runs.engines.settings import LOCAL, EngineSettings
from hfpatch.runs.engines.worker import UnitWorker
from hfpatch.runs.plan import Unit
from hfpatch.support.files import clear_about_writing
from hfpatch.support.signals import sigterm_kept

CONNECT_S = 10.0
"""How long an address may take to answer."""
PACKAGES = ("hfpatch", "torch", "transformers", "peft", "ray")
SEEN_S = 5.0
"""How long a file may take to be seen from another machine, which network file systems may remember as absent."""
_POLL_S = 0.2
START_S = 120.0
"""How long a machine may take to start a process and report on itself."""
STORE_BYTES = 80_000_000
"""Ray's memory for objects on this machine: units and outcomes are all that is sent."""
_PASSED_ON = ("TRANSFORMERS_", "HF_HUB_", "DATASETS_VERBOSITY", "HF_DATASETS_", "TOKENIZERS_", "HFPATCH_MATMUL")


class RayWorkers:
    """Actors that each hold the devices of one run for as long as the command lasts, so that models stay loaded.

    Ray decides on which machines they are. One that ends is made again; Ray itself repeats nothing.

    Attributes:
        threads: torch's threads of each process.
    """

    def __init__(self, settings: EngineSettings) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a run without GPUs sees none
        try:
            import ray
        except ImportError as error:
            raise HfpatchError("--ray needs Ray, which is not installed; pip install 'hfpatch[ray]'") from error
        self.ray: ModuleType = ray
        self.settings, self._joined = settings, False
        self.cpus = settings.cpus_per_run or settings.processes
        self.threads = max(1, self.cpus // settings.processes)

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

    def check(self, job: Job) -> None:
        """Check, before the first worker, that every machine has the same versions and sees the run folder.

        Raises:
            HfpatchError: if one does not.
        """
        if self.settings.ray == LOCAL:
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        inspect, asked, reports = self.ray.remote(inspect_node), list[tuple[str, Any]](), list[NodeReport]()
        with shared_token(job.out) as token:
            for node in self.ray.nodes():
                if node["Alive"]:
                    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    report = inspect.options(num_cpus=0, scheduling_strategy=there).remote(token)
                    asked.append((str(node["NodeManagerHostname"]), report))
            for name, report in asked:
                try:
                    reports.append(self.ray.get(report, timeout=START_S))
                except self.ray.exceptions.TaskUnschedulableError:  # it has left the cluster meanwhile
                    continue
                except Exception as error:  # whatever Ray raises where a process cannot start or import hfpatch
                    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
                    raise HfpatchError(
                        f"{name}: hfpatch cannot be started there ({reason}); install the same on all machines"
                    ) from error
            check_nodes(reports, token, current_versions())

    def room(self) -> int:
        """Return how many runs fit on the machines that are there now, or how many were asked for."""
        return self.settings.jobs or max(1, sum(self._fits(node) for node in self._nodes()))

    def make(self, job: Job, number: int) -> Actor:
        """Make an actor."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0}
        passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        if passed and self.settings.ray != LOCAL:  # on this machine they are inherited
            options["runtime_env"] = {"env_vars": passed}
        return Actor(self.ray, self.ray.remote(UnitWorker).options(**options), job)

    def describe(self) -> str:
        """Return the number of machines, and the devices of a run."""
        nodes, gpus = len(self._nodes()), f" and {self.gpus:g} GPUs" if self.gpus else ""
        cores = f"{self.cpus} CPU core{'s' * (self.cpus > 1)}"
        where = "this machine" if self.settings.ray == LOCAL else f"{nodes} machine{'s' * (nodes > 1)}"
        return f"{self.room()} runs at a time on {where}, each on {cores}{gpus}, by Ray"

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


class Actor:
    """A worker: one actor.

    Attributes:
        place: where it is, known once its devices are free for it.
    """

    def __init__(self, ray: ModuleType, remote: Any, job: Job) -> None:
        self._ray, self._actor = ray, remote.remote(job)
        self.place: Future[Place] = self._actor.place.remote().future()

    def submit(self, unit: Unit) -> Future[Outcome]:
        """Let it work on a unit; the future raises if the actor has ended, and for no other reason."""
        future: Future[Outcome] = self._actor.work.remote(unit).future()
        return future

    def terminate(self) -> None:
        """Send SIGTERM where that is possible, on this machine; elsewhere Ray can only kill, which `kill` does."""
        if self.place.done() and not self.place.exception() and self.place.result().node == socket.gethostname():
            with suppress(OSError):
                os.kill(self.place.result().pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; without effect if it has ended."""
        with suppress(Exception):  # Ray may have lost it, or be gone itself
            self._ray.kill(self._actor)

    def leave(self) -> None:
        """Let it end, as it has nothing to do any longer."""
        self.kill()


@dataclass(frozen=True)
class Token:
    """A file in the run folder, and its content."""

    path: Path
    text: str


@dataclass(frozen=True)
class NodeReport:
    """The report of one machine.

    Attributes:
        node: its name.
        sees_folder: whether it read the token.
        versions: of Python and of each package; empty text for one that is not there.
    """

    node: str
    sees_folder: bool
    versions: Mapping[str, str]


@contextmanager
def shared_token(out: Path) -> Iterator[Token]:
    """Write a token into the run folder, and remove it afterwards.

    Raises:
        HfpatchError: if the folder cannot be written.
    """
    token = Token(out.absolute() / f".seen-{uuid.uuid4().hex}", uuid.uuid4().hex)
    with clear_about_writing(token.path):
        token.path.write_text(token.text, encoding="utf-8")
    try:
        yield token
    finally:
        token.path.unlink(missing_ok=True)


def inspect_node(token: Token, *, wait_s: float = SEEN_S) -> NodeReport:
    """Return this machine's report."""
    deadline, seen = time.monotonic() + wait_s, False
    while True:
        with suppress(OSError):
            seen = token.path.read_text(encoding="utf-8") == token.text
        if seen or time.monotonic() >= deadline:
            return NodeReport(socket.gethostname(), seen, current_versions())
        time.sleep(_POLL_S)


def current_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a number here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def check_nodes(reports: Sequence[NodeReport], token: Token, versions: Mapping[str, str]) -> None:
    """Compare the reports of machines with the driver.

    Args:
        reports: one of each machine.
        token: the file that they were asked to read.
        versions: the driver's.

    Raises:
        HfpatchError: in one line with every machine that does not see the folder, or else with every version that
            differs and where.
    """
    blind = list(dict.fromkeys(report.node for report in reports if not report.sees_folder))
    if blind:
        raise HfpatchError(
            f"{token.path.parent}: cannot be seen from {', '.join(blind)}; choose an --out on a file system that all "
            "machines mount under the same path, such as NFS"
        )
    differ = [
        f"{name} is {report.versions.get(name) or 'missing'} on {report.node} and {own or 'missing'} here"
        for report in reports
        for name, own in versions.items()
        if report.versions.get(name) != own
    ]
    if differ:
        raise HfpatchError(f"versions differ: {'; '.join(dict.fromkeys(differ))}; install the same on all machines")
