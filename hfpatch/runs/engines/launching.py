"""Starts Python processes: workers, and the processes that share a unit on several devices."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.runs.locks import new_holder
from hfpatch.runs.plan import MEASURING

if TYPE_CHECKING:
    from hfpatch.runs.engines.work import Job

TASK = "task"
_POLL_S = 0.2


def start(
    folder: Path, task: Any, launcher: Sequence[str] = (), env: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `hfpatch.runs.engines.work` in a session of its own, so that Ctrl-C reaches only the driver.

    It finds the modules that this process finds. (Python before 3.11 adds the working directory.)
    """
    (folder / TASK).write_bytes(pickle.dumps(task))
    env = {**env, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *launcher, "-m", "hfpatch.runs.engines.work", str(folder)]
    return subprocess.Popen(command, env=env, start_new_session=True, stdin=subprocess.DEVNULL, **options)


def launch(job: Job, number: int, on_start: Callable[[int], None]) -> str:
    """Complete one unit in new processes, which end if this one does; return how they ended.

    A training is shared by them through torchrun, or through `accelerate launch` where the job names a configuration,
    as FSDP2 and DeepSpeed need one. An evaluation is shared, too; each process has a whole model.

    Args:
        job: the job.
        number: the unit's number in the plan.
        on_start: called with the id of the process that starts the others and outlives them.

    Raises:
        Terminated: if this process was asked to end; a checkpoint has been written then.
    """
    from hfpatch.training.interruption import Terminated, watch_sigterm

    processes, config = str(job.settings.processes), job.settings.launch_config
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    if config is not None and job.plan.units[number].action not in MEASURING:
        launcher = ["-m", "accelerate.commands.launch", "--config_file", config]
        launcher += ["--num_processes", processes, "--main_process_port", "0"]
    with tempfile.TemporaryDirectory(prefix="hfpatch-") as name, watch_sigterm() as sigterm:
        folder, forwarded = Path(name), False
        with (folder / "output.txt").open("wb") as output:
            started = start(folder, (job, number, new_holder()), launcher, stdout=output, stderr=output)
        on_start(started.pid)
        while started.poll() is None:
            if sigterm.asked and not forwarded:
                started.terminate()  # the launcher passes it on
                forwarded = True
            with suppress(subprocess.TimeoutExpired):
                started.wait(_POLL_S)
        if forwarded:
            raise Terminated(None)
        said = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its processes ended with exit code {started.returncode}: {said[-1] if said else 'no output'}"
