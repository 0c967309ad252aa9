"""The provenance of a result: commit, versions, platform, device, command line."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hfpatch.support.environment import CPU_ONLY, is_set

PACKAGES = ("hfpatch", "torch", "transformers", "peft", "accelerate", "lm_eval", "datasets", "tokenizers", "numpy")

_CPU_ONLY = is_set(CPU_ONLY)  # read at import: the driver of workers sets it later, to leave them the devices


@dataclass(frozen=True)
class Clock:
    """The wall time of a run.

    Attributes:
        started: when the run first started, ISO 8601.
        before: seconds that sessions before this one took.
        began: the monotonic time at which this session began.
    """

    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    before: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long the run has taken until now."""
        return self.before + time.monotonic() - self.began


def provenance(clock: Clock) -> dict[str, Any]:
    """Return the provenance of a result as JSON values; the device is the first accelerator that a run may use."""
    import torch

    commit, dirty = checkout_state()
    accelerator = None if _CPU_ONLY else torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu")
    return {
        "commit": commit,
        "dirty": dirty,
        "command": command_line(sys.argv),
        "started": clock.started,
        "wall_s": round(clock.seconds, 3),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "processor": processor(),
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": installed_versions(),
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return vendor, name, family and model of the processor, where the system says them; else Python's name for it.

    Virtual machines often shorten the name, which family and model then complete: "AMD EPYC, family 25 model 17".
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = f"{facts.get('vendor_id', '')} {facts.get('model name', platform.processor())}".strip()
    numbers = (f"{label} {facts[key]}" for label, key in (("family", "cpu family"), ("model", "model")) if key in facts)
    return ", ".join(filter(None, (name, " ".join(numbers))))


def checkout_state(package: Path = Path(__file__).parents[1]) -> tuple[str | None, bool]:
    """Return the commit of hfpatch's checkout and whether it has uncommitted changes; (None, False) for a wheel."""
    root = package.parent
    if not (root / ".git").exists():
        return None, False
    commit = _git(root, "rev-parse", "HEAD")
    return commit or None, bool(commit and _git(root, "status", "--porcelain", "--untracked-files=no"))


def installed_versions() -> dict[str, str]:
    """Return the versions of :data:`PACKAGES`; torch's own names its build (``+cpu``, ``+cu130``)."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = getattr(sys.modules.get(name), "__version__", None) or version(name)
        except PackageNotFoundError:
            continue
    return versions


def command_line(arguments: list[str]) -> str:
    """Return the command to type again, with ``~`` for the home folder and without the program's folder."""
    program = Path(arguments[0])
    name = "python -m hfpatch" if program.name == "__main__.py" else program.name
    home = str(Path.home()) + os.sep
    words = [(word.removeprefix(home), word.startswith(home)) for word in arguments[1:]]
    return " ".join([name, *(f"~/{shlex.quote(rest)}" if at_home else shlex.quote(rest) for rest, at_home in words)])


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
