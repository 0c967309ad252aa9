"""Peak memory of a stretch of the program."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak_memory() -> None:
    """Start measuring again: CUDA's allocator where there is one, else the process's resident memory.

    Where the system cannot reset the latter, the peak is that of the whole process.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")


def resident_memory_bytes() -> int:
    """Return what is held now, in bytes; 0 where the system does not tell."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    return _from_status("VmRSS") or 0


def peak_memory_bytes() -> int:
    """Return the peak since the last reset, in bytes."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = _from_status("VmHWM")
    if peak is not None:
        return peak
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _from_status(name: str) -> int | None:
    """Return a figure of Linux's own books, in bytes."""
    if not _STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024
