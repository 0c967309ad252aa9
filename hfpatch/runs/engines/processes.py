"""Workers that are processes of this machine: ``--jobs N``."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from hfpatch.errors import HfpatchError
from hfpatch.runs.engines.forking import CODE, OUTPUT
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.engines.work import BORN, TASK, Job
from hfpatch.runs.locks import birth
from hfpatch.support.cpu import count_cores
from hfpatch.training.processes import runs_on_cpu

VISIBLE = "CUDA_VISIBLE_DEVICES"


class WorkerProcess(subprocess.Popen[bytes]):
    """A worker in a process of this machine, and in a session of its own, so that Ctrl-C reaches only the driver.

    It finds the modules that this process finds. (Python before 3.11 adds the working directory.) Where processes share
    runs, torchrun starts them or, with a configuration, which FSDP2 and DeepSpeed need, accelerate. A new ``folder`` is
    for the task, a job and the worker's seat, and for what the worker prints. Without a task it forks workers.
    """

    def __init__(self, folder: Path, task: tuple[Job, int] | None, env: Mapping[str, str] = os.environ) -> None:
        self.folder, words = folder, ["hfpatch.runs.engines.forking"]
        folder.mkdir()
        if task is not None:
            (folder / TASK).write_bytes(pickle.dumps(task))
            words, settings = ["hfpatch.runs.engines.work"], task[0].settings
            count = str(settings.processes)
            if settings.launch_config is not None:
                launcher = ["accelerate.commands.launch", "--config_file", settings.launch_config]
                words = [*launcher, "--num_processes", count, "--main_process_port", "0", "-m", *words]
            elif settings.processes > 1:
                words = ["torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m", *words]
        env = {**env, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with (folder / OUTPUT).open("wb") as output:
            super().__init__(
                [sys.executable, "-m", *words, str(folder)],
                bufsize=0,
                env=env,
                start_new_session=True,
                stdin=subprocess.DEVNULL if task else subprocess.PIPE,
                stdout=output,
                stderr=output,
            )

    def ended(self) -> str | None:
        """Return the exit code and, unless a signal ended it, what it printed last; None while it has not ended."""
        return None if (code := self.poll()) is None else _described(code, self.folder)

    def end(self) -> None:
        """End it and the processes that it started at once; without effect if all have ended."""
        self.kill()
        self.wait()
        _end_processes(self.folder)


class ForkedWorker:
    """A worker forked by ``parent``, a `WorkerProcess` without a task, with which it ends."""

    def __init__(self, folder: Path, task: tuple[Job, int], parent: WorkerProcess) -> None:
        self.folder, self.parent = folder, parent
        folder.mkdir()
        (folder / TASK).write_bytes(pickle.dumps(task))
        assert parent.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            parent.stdin.write(os.fsencode(folder) + b"\n")

    def ended(self) -> str | None:
        """Return how it has ended, as a `WorkerProcess` does."""
        with suppress(OSError, ValueError):  # while its code is not there
            return _described(int((self.folder / CODE).read_text()), self.folder)
        return self.parent.ended()

    def end(self) -> None:
        """End it at once; without effect if it has ended, or is not there yet and will find the queue closed."""
        _end_processes(self.folder)


def _end_processes(folder: Path) -> None:
    """End a worker's processes, which outlive for a while what started them, and would write into the queue."""
    (folder / TASK).unlink(missing_ok=True)  # without which one that has not begun ends, see `begin`
    for file in folder.glob(BORN):
        pid, born = int(file.stem), file.read_text()
        if birth(pid) == born:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while birth(pid) == born:  # it writes no more once it is gone
            time.sleep(0.01)


def _described(code: int, folder: Path) -> str:
    lines = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
    last = [line.strip() for line in lines if code > 0 and any(map(str.isalnum, line))][-1:]
    return ": ".join([f"exit code {code}", *last])


class Processes:
    """Processes that share this machine's cores and GPUs; ``stack`` releases what they take.

    Raises:
        HfpatchError: if this machine has fewer cores or GPUs than the runs ask for.
    """

    def __init__(self, settings: EngineSettings, stack: ExitStack) -> None:
        self.settings, jobs = settings, settings.jobs or 1
        self.most = jobs  # how many workers there may be
        self._environment = dict(os.environ)  # before the driver turns itself to the CPU
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hfpatch-")))
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
        # CUDA cannot be used by a process whose parent has counted devices before it forked, which importing
        # bitsandbytes does; macOS's libraries do not survive a fork
        self._parent: WorkerProcess | None = None
        if sys.platform == "linux" and settings.processes == 1 and not self._devices and runs_on_cpu():
            self._parent = WorkerProcess(self._folder / "parent", None)  # it imports while this process loads the base
            stack.callback(self._end_parent)
        self.description = f"{jobs} runs at a time, each on {share} thread{'s' * (share > 1)} of this machine"

    def start(self, job: Job, seat: int, slot: int) -> WorkerProcess | ForkedWorker:
        """Start a worker in one of `most` slots, which decides its GPUs."""
        folder = job.queue / f"worker-{seat}"
        if self._parent is not None:
            if self._parent.poll() is not None:
                self._parent = WorkerProcess(self._folder / f"parent-{seat}", None, self._environment)
            return ForkedWorker(folder, (job, seat), self._parent)
        environment, gpus = dict(self._environment), self.settings.gpus_per_run
        first, count = slot * int(gpus or 0), int(gpus or 0)
        if gpus is None or 0 < gpus < 1:  # one GPU, which several may share
            sharing = 1 if gpus is None else room_on(1, gpus)
            first, count = slot // sharing % max(1, len(self._devices)), 1
        if self._devices:
            environment[VISIBLE] = ",".join(self._devices[first : first + count])
        return WorkerProcess(folder, (job, seat), environment)

    def _end_parent(self) -> None:
        """End the process that forks workers, after them."""
        if self._parent is not None:
            self._parent.terminate()  # ends it while it imports
            self._parent.communicate()  # ends its input, and waits


def room_on(gpus: int, gpus_per_run: float) -> int:
    """Return how many runs fit on ``gpus`` GPUs; a fraction of a GPU is on one GPU."""
    if gpus_per_run >= 1:
        return gpus // int(gpus_per_run)
    return gpus * math.floor(1 / gpus_per_run + 1e-6)
