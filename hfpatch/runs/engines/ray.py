"""Workers that are tasks of Ray: ``--ray``, on this machine or on a cluster."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, first_line
from hfpatch.runs.engines.processes import WorkerProcess, room_on
from hfpatch.runs.engines.settings import LOCAL, EngineSettings
from hfpatch.runs.engines.work import OPEN, Job, work
from hfpatch.runs.locks import new_holder
from hfpatch.support.signals import sigterm_kept

CONNECT_S = 10.0
"""How long an address may take to answer."""
SEEN_S = 5.0
"""How long a file may take to be seen from another machine, which network file systems may remember as absent."""
STORE_BYTES = 80_000_000
"""Ray's memory for objects on this machine: jobs are all that is sent."""
_PASSED_ON = ("TRANSFORMERS_", "HF_HUB_", "DATASETS_VERBOSITY", "HF_DATASETS_", "TOKENIZERS_", "HFPATCH_MATMUL")


class RayTasks:
    """Tasks that each have the devices of one run for as long as the command lasts, so that models stay loaded.

    Ray decides on which machines they are. Those for which no devices are free wait, and begin as soon as a machine
    joins. Arguments and attributes are those of `Processes`; ``most`` is None for as many as there are ready units.

    Raises:
        HfpatchError: if Ray is not installed or cannot be joined, or no machine has the devices that a run asks for.
    """

    def __init__(self, settings: EngineSettings, stack: ExitStack) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a run without GPUs sees none
        try:
            import ray
        except ImportError as error:
            raise HfpatchError("--ray needs Ray, which is not installed; pip install 'hfpatch[ray]'") from error
        self._ray: Any = ray
        self.settings, self.most, address = settings, settings.jobs, str(settings.ray)
        if not ray.is_initialized():
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address == LOCAL:
                options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
            try:
                if address not in (LOCAL, "auto"):  # Ray itself tries for minutes
                    host, _, port = address.removeprefix("ray://").rpartition(":")
                    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
                with sigterm_kept():
                    ray.init(address=address, **options)
            except (OSError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise HfpatchError(
                    f"--ray {address}: cannot be joined ({reason}); start the cluster with ray start"
                ) from error
            stack.callback(ray.shutdown)
        self.cpus = settings.cpus_per_run or settings.processes
        self.threads = max(1, self.cpus // settings.processes)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        one = float(any(node.get("GPU") for node in nodes))  # one GPU where there are any
        if one:
            settings.check_default_gpus()
        self.gpus = one if settings.gpus_per_run is None else settings.gpus_per_run
        devices = f"{self.cpus} CPU core{'s' * (self.cpus > 1)}" + (f" and {self.gpus:g} GPUs" if self.gpus else "")
        room = 0
        for node in nodes:
            by_cpus = int(node.get("CPU", 0) // self.cpus)
            room += min(by_cpus, room_on(int(node.get("GPU", 0)), self.gpus)) if self.gpus else by_cpus
        if room == 0:
            there = sorted({f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes})
            raise HfpatchError(
                f"no machine of the cluster has {devices} for a run (there are machines of {', '.join(there)}); lower "
                "--cpus-per-run or --gpus-per-run, or start a machine that has them"
            )
        where = "this machine" if address == LOCAL else f"{len(nodes)} machine{'s' * (len(nodes) > 1)}"
        self.description = f"{self.most or room} runs at a time on {where}, each on {devices}, by Ray"

    def start(self, job: Job, seat: int, slot: int) -> Task:
        """Submit a task; Ray chooses its machine and devices."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": 0, "max_calls": 1}
        passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        if passed and self.settings.ray != LOCAL:  # on this machine they are inherited
            options["runtime_env"] = {"env_vars": passed}
        return Task(self._ray, self._ray.remote(**options)(work_there).remote(job, seat))


@dataclass(frozen=True)
class Task:
    """A task of Ray, in a process of its own that ends with it."""

    ray: Any
    result: Any

    def ended(self) -> str | None:
        """Return how it has ended; None while it has not."""
        if not self.ray.wait([self.result], timeout=0)[0]:
            return None
        try:
            self.ray.get(self.result)
        except Exception as error:  # whatever Ray raises where a process ends or cannot start
            cause = getattr(error, "cause", None) or error  # what the task itself has raised
            return first_line(cause, kind=True)
        return "it has left"

    def end(self) -> None:
        """End it at once, or let it not begin; without effect if it has ended."""
        with suppress(Exception):  # Ray may have lost it, or be gone itself
            self.ray.cancel(self.result, force=True)


def work_there(job: Job, seat: int) -> None:
    """Work on a machine that sees the run folder.

    Raises:
        HfpatchError: if it does not, or as `work`.
        RuntimeError: if processes that share a run end before the driver ends them.
    """
    node, deadline = socket.gethostname(), time.monotonic() + SEEN_S
    while not (job.queue / OPEN).exists():
        if time.monotonic() > deadline:
            raise HfpatchError(
                f"{job.plan.out}: cannot be seen from {node}; choose an --out on a file system that all machines mount "
                "under the same path, such as NFS"
            )
        time.sleep(0.2)
    if job.settings.processes == 1:
        work(job, seat)
        return
    with tempfile.TemporaryDirectory(prefix="hfpatch-") as name:
        launcher = WorkerProcess(Path(name, "worker"), (replace(job, parent=new_holder()), seat))
        if launcher.wait():
            raise RuntimeError(launcher.ended())
