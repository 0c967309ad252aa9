"""Workers that are processes of this machine: ``--jobs N``."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

import torch

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.engines.work import BORN, TASK, Job
from hfpatch.runs.locks import birth
from hfpatch.support.cpu import count_cores
from hfpatch.support.files import clear_about_writing
from hfpatch.training.processes import runs_on_cpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
OUTPUT = "output"
"""The file in the folder of a worker with what it prints."""


class WorkerProcess(subprocess.Popen[bytes]):
    """A worker in a process of this machine, and in a session of its own, so that Ctrl-C reaches only the driver.

    It finds the modules that this process finds. (Python before 3.11 adds the working directory.) Where processes share
    runs, torchrun starts them or, with a configuration, which FSDP2 and DeepSpeed need, accelerate. Its ``folder``, in
    the queue, is for the job and its seat, and for what it prints.
    """

    def __init__(self, job: Job, seat: int, env: Mapping[str, str] = os.environ) -> None:
        self.folder, settings, words = job.queue / f"worker-{seat}", job.settings, ["hfpatch.runs.engines.work"]
        with clear_about_writing(self.folder):
            self.folder.mkdir()
            (self.folder / TASK).write_bytes(pickle.dumps((job, seat)))
        count = str(settings.processes)
        if settings.launch_config is not None:
            launcher = ["accelerate.commands.launch", "--config_file", settings.launch_config]
            words = [*launcher, "--num_processes", count, "--main_process_port", "0", "-m", *words]
        elif settings.processes > 1:
            words = ["torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m", *words]
        env = {**env, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with (self.folder / OUTPUT).open("wb") as output:
            super().__init__(
                [sys.executable, "-m", *words, str(self.folder)],
                env=env,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def ended(self) -> str | None:
        """Return the exit code and, unless a signal ended it, what it printed last; None while it has not ended."""
        if (code := self.poll()) is None:
            return None
        lines = (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
        last = [line.strip() for line in lines if code > 0 and any(map(str.isalnum, line))][-1:]
        return ": ".join([f"exit code {code}", *last])

    def end(self) -> None:
        """End it and the processes that it started at once; without effect if all have ended.

        These outlive for a while what started them, and would write into the queue.
        """
        self.kill()
        self.wait()
        (self.folder / TASK).unlink(missing_ok=True)  # without which one that has not begun ends, see `begin`
        for file in self.folder.glob(BORN):
            pid, born = int(file.stem), file.read_text()
            if birth(pid) == born:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while birth(pid) == born:  # it writes no more once it is gone
                time.sleep(0.01)


class Processes:
    """Processes that share this machine's cores and GPUs.

    Raises:
        HfpatchError: if this machine has fewer cores or GPUs than the runs ask for.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, jobs = settings, settings.jobs or 1
        self.most = jobs  # how many workers there may be
        self._environment = dict(os.environ)  # before the driver turns itself to the CPU
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
        self._devices = named[:count] if named else [str(number) for number in range(count)]
        gpus, cpus = settings.gpus_per_run, settings.cpus_per_run
        if count and not runs_on_cpu():
            settings.check_default_gpus()
        if gpus and jobs > (room := room_on(count, gpus)):
            raise HfpatchError(
                f"--jobs {jobs} with --gpus-per-run {gpus:g}: this machine has {count} GPUs, enough for {room} runs "
                "at a time"
            )
        if cpus and jobs * cpus > (cores := count_cores()):
            raise HfpatchError(f"--jobs {jobs} with --cpus-per-run {cpus}: this machine has {cores} cores; lower one")
        # The share of each run in the cores, at most as many threads as torch uses here
        share = min(cpus or max(1, count_cores() // jobs), torch.get_num_threads())
        self.threads = max(1, share // settings.processes)  # of each process
        share = self.threads * settings.processes
        self.description = f"{jobs} runs at a time, each on {share} thread{'s' * (share > 1)} of this machine"

    def start(self, job: Job, seat: int, slot: int) -> WorkerProcess:
        """Start a worker in one of `most` slots, which decides its GPUs."""
        environment, gpus = dict(self._environment), self.settings.gpus_per_run
        first, count = slot * int(gpus or 0), int(gpus or 0)
        if gpus is None or 0 < gpus < 1:  # one GPU, which several may share
            sharing = 1 if gpus is None else room_on(1, gpus)
            first, count = slot // sharing % max(1, len(self._devices)), 1
        if self._devices:
            environment[VISIBLE] = ",".join(self._devices[first : first + count])
        return WorkerProcess(job, seat, environment)


def room_on(gpus: int, gpus_per_run: float) -> int:
    """Return how many runs fit on ``gpus`` GPUs; a fraction of a GPU is on one GPU."""
    if gpus_per_run >= 1:
        return gpus // int(gpus_per_run)
    return gpus * math.floor(1 / gpus_per_run + 1e-6)
