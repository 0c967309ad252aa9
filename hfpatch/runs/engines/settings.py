"""Which engine a command asks for, as plain values that need no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hfpatch.errors import HfpatchError

LOCAL = "local"
"""The address that starts Ray on this machine."""
_ADDRESS = re.compile(r"(?:ray://)?(?:[^\s:/,\[\]]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")


@dataclass(frozen=True)
class EngineSettings:
    """Where runs take place, as the options of the command line say.

    Attributes:
        jobs: how many runs at a time; None is one in this process or, with Ray, as many as fit.
        ray: the address of a Ray cluster, ``auto``, or ``local``; None works without Ray.
        gpus_per_run: GPUs of a run, fractions allowed; None is one each where there are any.
        cpus_per_run: CPU cores, and torch's threads, of a run; None is its share of this machine, with Ray one.
        processes_per_run: processes that share a training; None is one for each GPU of the run.
        launch_config: accelerate's configuration file for these processes; None is plain data parallelism.
    """

    jobs: int | None = None
    ray: str | None = None
    gpus_per_run: float | None = None
    cpus_per_run: int | None = None
    processes_per_run: int | None = None
    launch_config: str | None = None

    def __post_init__(self) -> None:
        for name in ("jobs", "gpus_per_run", "cpus_per_run", "processes_per_run"):
            value = getattr(self, name)
            if value is not None and not (value > 0 or (name == "gpus_per_run" and value == 0)):
                raise HfpatchError(f"--{name.replace('_', '-')} {value:g}: must be positive")
        if self.ray not in (None, LOCAL, "auto"):
            match = _ADDRESS.fullmatch(str(self.ray))
            if match is None or not 0 < int(match[1]) < 2**16:
                raise HfpatchError(
                    f"--ray {self.ray or repr('')}: write the address of a cluster as HOST:PORT, ray://HOST:PORT or "
                    "auto, or leave it out for Ray on this machine"
                )
        gpus = self.gpus_per_run or 0.0
        if gpus > 1 and not float(gpus).is_integer():
            raise HfpatchError(f"--gpus-per-run {gpus:g}: more than one GPU must be a whole number")
        if self.processes_per_run is not None and gpus > 0 and self.processes_per_run != max(1, gpus):
            raise HfpatchError(
                f"--processes-per-run {self.processes_per_run}: a run has one process for each of its GPUs "
                f"(--gpus-per-run {gpus:g}); leave the option out"
            )
        if self.launch_config is not None and self.processes == 1:
            raise HfpatchError("--accelerate-config: a training of one process has none; add --gpus-per-run 2 or more")
        if self.launch_config is not None and not Path(self.launch_config).is_file():
            raise HfpatchError(f"--accelerate-config {self.launch_config}: there is no such file")
        if self.is_sequential and (self.gpus_per_run, self.cpus_per_run, self.processes_per_run) != (None, None, None):
            raise HfpatchError("options for each run go with --jobs N or --ray; add one of them")

    def check_default_gpus(self) -> None:
        """Refuse several processes for a run on a machine with GPUs, of which a run has one unless told."""
        if self.gpus_per_run is None and self.processes > 1:
            raise HfpatchError(
                f"--processes-per-run {self.processes}: a run has one GPU here, and each process needs one; write "
                f"--gpus-per-run {self.processes}, or --gpus-per-run 0 to train on the CPU"
            )

    @property
    def is_sequential(self) -> bool:
        """Whether runs are worked on one after the other in the process that asks."""
        return self.jobs is None and self.ray is None

    @property
    def processes(self) -> int:
        """How many processes share a training."""
        return self.processes_per_run or max(1, int(self.gpus_per_run or 1))
