"""Peak memory of a stretch of the program."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak_memory() -> None:
    """Start measuring anew: CUDA's allocator where there is one, else the process's resident memory.

    Where the system cannot reset the latter, the peak is that of the whole process.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")


def peak_memory_bytes() -> int:
    """Return the peak since the last reset, in bytes."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
