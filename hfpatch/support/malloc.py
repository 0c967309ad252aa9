"""The memory that this process keeps for its next tensors on the CPU, instead of giving it back to the system."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_KEPT = 256 << 20
_LARGEST = 32 << 20  # of glibc's own threshold; larger blocks are mapped one by one, and are given back
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_BY_HAND = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep up to 256 MiB that were freed, until this process ends.

    A forward pass frees what the next layer allocates again. By default glibc gives the end of its heap back to the
    system as soon as some hundred KiB there are free, and the system clears each page that it hands out again. In
    short batches on the CPU that was a tenth of the time.

    Returns:
        Whether it does: glibc alone knows these thresholds, and one that a variable such as ``MALLOC_TRIM_THRESHOLD_``
        sets stays as it is.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  which other C libraries lack
    except (AttributeError, OSError, TypeError):
        return False
    if any(name in os.environ for name in _BY_HAND):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(library.mallopt(_TRIM_THRESHOLD, _KEPT))
