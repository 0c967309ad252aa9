"""Runs that need several devices: a worker starts the processes that share a training, and waits for them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hfpatch.runs.engines.job import Job, Outcome
from hfpatch.runs.locks import new_holder
from hfpatch.runs.plan import MEASURING, Unit

TASK = "task"
OUTCOME = "outcome-{}"
_OUTPUT = "output.txt"
_POLL_S = 0.2
_MODULE = "hfpatch.runs.engines.worker"


def launch(job: Job, unit: Unit) -> Outcome:
    """Complete one unit in new processes, and return its outcome.

    A training is shared by ``job.processes``, through torchrun, or through `accelerate launch` where the job names a
    configuration, as FSDP2 and DeepSpeed need one. An evaluation is shared, too; each process has a whole model.
    All of them end if this one does.

    Raises:
        Terminated: if this process was asked to end; a checkpoint has been written then.
    """
    from hfpatch.training.interruption import Terminated, watch_sigterm

    processes, config = job.processes, None if unit.action in MEASURING else job.launch_config
    with tempfile.TemporaryDirectory(prefix="hfpatch-") as name, watch_sigterm() as sigterm:
        folder = Path(name)
        (folder / TASK).write_bytes(pickle.dumps((replace(job, processes=1), unit, new_holder())))
        with (folder / _OUTPUT).open("wb") as output:
            launcher = [sys.executable]
            if config is not None:
                options = ["--config_file", config, "--num_processes", str(processes), "--main_process_port", "0"]
                launcher += ["-m", "accelerate.commands.launch", *options]
            elif processes > 1:
                launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = [*launcher, "-m", _MODULE, name]
            # `python -m` finds modules of the working directory only if this process does; read since Python 3.11
            finds_them = {"", str(Path.cwd())} & set(sys.path)
            env = {**os.environ, **({} if finds_them else {"PYTHONSAFEPATH": "1"})}
            started = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
        forwarded = False
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = started.wait(_POLL_S)
                break
            if sigterm.asked and not forwarded:
                started.terminate()  # the launcher passes it on
                forwarded = True
        if forwarded:
            raise Terminated(None)
        written = [folder / OUTCOME.format(rank) for rank in range(processes)]
        known: list[Outcome] = [pickle.loads(path.read_bytes()) for path in written if path.is_file()]
        failed = [outcome for outcome in known if outcome.error is not None]
        if failed or (code == 0 and known):
            return (failed or known)[0]
        lines = (folder / _OUTPUT).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return Outcome(ended=f"its processes ended with exit code {code}: {lines[-1] if lines else 'no output'}")
