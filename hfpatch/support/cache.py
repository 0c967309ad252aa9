"""Where what is costly to make is kept between commands."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from tempfile import TemporaryFile


def cache_folder(kind: str) -> Path:
    """Return ``$HFPATCH_CACHE/<kind>``, by default ``~/.cache/hfpatch/<kind>``."""
    return Path(os.environ.get("HFPATCH_CACHE", "~/.cache/hfpatch")).expanduser() / kind


def is_writable(folder: Path, what: str) -> bool:
    """Return whether a folder, which is made if need be, takes files; warn that ``what`` is not kept where it does not.

    A cache is a convenience: work goes on without it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return True
    except OSError as error:
        warnings.warn(f"{what} are not kept for the next run: {folder}: {error.strerror}", stacklevel=2)
        return False
