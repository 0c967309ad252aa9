"""Workers that are processes of this machine: ``--jobs N``."""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.launching import start
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.engines.work import Job
from hfpatch.support.cpu import count_cores

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Processes:
    """So many processes of this machine, which share its cores and GPUs."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.most = settings.jobs or 1  # how many workers there may be
        self.devices: list[str] = []
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hfpatch-")
        self._environment = dict(os.environ)  # before the driver turns itself to the CPU

    def connect(self) -> None:
        """Count this machine's cores and GPUs.

        Raises:
            HfpatchError: if it has fewer than the runs ask for.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
        self.devices = named[:count] if named else [str(number) for number in range(count)]
        gpus, cpus, jobs = self.settings.gpus_per_run, self.settings.cpus_per_run, self.most
        if gpus and jobs > (room := room_on(len(self.devices), gpus)):
            raise HfpatchError(
                f"--jobs {jobs} with --gpus-per-run {gpus:g}: this machine has {len(self.devices)} GPUs, enough for "
                f"{room} runs at a time"
            )
        if cpus and jobs * cpus > (cores := count_cores()):
            raise HfpatchError(f"--jobs {jobs} with --cpus-per-run {cpus}: this machine has {cores} cores; lower one")
        # The share of each process in the cores, at most as many threads as torch uses here
        share = min(cpus or max(1, count_cores() // jobs), torch.get_num_threads())
        self.threads = max(1, share // self.settings.processes)

    def room(self) -> int:
        """Return how many runs are worked on at a time."""
        return self.most

    def describe(self) -> str:
        """Return how many runs are worked on at a time, and on what."""
        threads = self.threads * self.settings.processes
        return f"{self.most} runs at a time, each on {threads} thread{'s' * (threads > 1)} of this machine"

    def start(self, job: Job, seat: int, slot: int) -> None:
        """Start a process in one of the slots, which decides its GPUs."""
        environment, gpus = dict(self._environment), self.settings.gpus_per_run
        first, count = slot * int(gpus or 0), int(gpus or 0)
        if gpus is None or 0 < gpus < 1:  # one GPU, which several may share
            sharing = 1 if gpus is None else room_on(1, gpus)
            first, count = slot // sharing % max(1, len(self.devices)), 1
        if self.devices:
            environment[VISIBLE] = ",".join(self.devices[first : first + count])
        folder = Path(self._folder.name, str(seat))
        folder.mkdir()
        self._started[seat] = start(folder, (job, seat, None), env=environment)

    def ended(self, seat: int) -> str | None:
        """Return how a worker has ended; None while it has not."""
        code = self._started[seat].poll()
        return None if code is None else f"exit code {code}"

    def end(self, seat: int) -> None:
        """End a worker at once; without effect if it has ended."""
        process = self._started.pop(seat)
        process.kill()
        process.wait()

    def close(self) -> None:
        """Remove what was handed to the workers, which have ended."""
        self._folder.cleanup()


def room_on(gpus: int, gpus_per_run: float) -> int:
    """Return how many runs fit on ``gpus`` GPUs; a fraction of a GPU is on one GPU."""
    if gpus_per_run >= 1:
        return gpus // int(gpus_per_run)
    return gpus * math.floor(1 / gpus_per_run + 1e-6)
