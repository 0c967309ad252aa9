"""Workers that are processes on this machine: ``--jobs N``."""

from __future__ import annotations

import math
import os
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import torch

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.job import Job, Outcome
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.engines.worker import UnitWorker, begin, work
from hfpatch.runs.plan import Unit
from hfpatch.support.cpu import count_cores
from hfpatch.training.processes import CPU_ONLY

VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAVE_S = 5.0
"""How long a worker without work may take to end."""


class Processes:
    """So many processes of this machine, which share its cores and GPUs.

    Attributes:
        threads: torch's threads of each process, known once it is connected.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, self.jobs = settings, settings.jobs or 1
        self.devices: list[str] = []
        self._environment: dict[str, str | None] = {CPU_ONLY: os.environ.get(CPU_ONLY)}

    def connect(self) -> None:
        """Count this machine's cores and GPUs.

        Raises:
            HfpatchError: if it has fewer than the runs ask for.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
        self.devices = named[:count] if named else [str(number) for number in range(count)]
        gpus, cpus = self.settings.gpus_per_run, self.settings.cpus_per_run
        if gpus and self.jobs > room_on(len(self.devices), gpus):
            raise HfpatchError(
                f"--jobs {self.jobs} with --gpus-per-run {gpus:g}: this machine has {len(self.devices)} GPUs, enough "
                f"for {room_on(len(self.devices), gpus)} runs at a time"
            )
        if cpus and self.jobs * cpus > (cores := count_cores()):
            raise HfpatchError(
                f"--jobs {self.jobs} with --cpus-per-run {cpus}: this machine has {cores} cores; lower one of them"
            )
        # The share of each process in the cores, at most as many threads as torch uses here
        share = min(cpus or max(1, count_cores() // self.jobs), torch.get_num_threads())
        self.threads = max(1, share // self.settings.processes)

    def check(self, job: Job) -> None:
        """Check nothing: this machine has the run folder."""

    def room(self) -> int:
        """Return the number asked for."""
        return self.jobs

    def make(self, job: Job, number: int) -> Process:
        """Make a process in place ``number``, with its own GPUs; there is no other in it."""
        environment, gpus = dict(self._environment), self.settings.gpus_per_run
        first, count = number * int(gpus or 0), int(gpus or 0)
        if gpus is None or 0 < gpus < 1:  # one GPU, which several may share
            each = 1 if gpus is None else math.floor(1 / gpus + 1e-6)
            first, count = number // each % max(1, len(self.devices)), 1
        if self.devices:
            environment[VISIBLE] = ",".join(self.devices[first : first + count])
        return Process(job, environment)

    def describe(self) -> str:
        """Return how many runs are worked on at a time."""
        threads = self.threads * self.settings.processes
        return f"{self.jobs} runs at a time, each on {threads} thread{'s' * (threads > 1)} of this machine"

    def close(self) -> None:
        """Close nothing: all workers have ended."""


class Process:
    """A worker: a pool of one process, so that its end is no other's.

    Attributes:
        place: where it is, known once it has started.
    """

    def __init__(self, job: Job, environment: dict[str, str | None]) -> None:
        self._pool = ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=begin, initargs=(job, environment)
        )
        self.place = self._pool.submit(UnitWorker.place)

    def submit(self, unit: Unit) -> Future[Outcome]:
        """Let it work on a unit; the future raises if the process has ended, and for no other reason."""
        return self._pool.submit(work, unit)

    def terminate(self) -> None:
        """Ask it to save a checkpoint and end."""
        for process in list((self._pool._processes or {}).values()):
            process.terminate()

    def kill(self) -> None:
        """End it at once; without effect if it has ended."""
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def leave(self) -> None:
        """Let it end and release what it shares with others; kill it if that takes long."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False)
        for process in processes:
            process.join(LEAVE_S)
            if process.is_alive():
                process.kill()


def room_on(gpus: int, gpus_per_run: float) -> int:
    """Return how many runs fit on ``gpus`` GPUs; a fraction of a GPU is on one GPU."""
    if gpus_per_run >= 1:
        return gpus // int(gpus_per_run)
    return gpus * math.floor(1 / gpus_per_run + 1e-6)
