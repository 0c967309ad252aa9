"""The folders of caches between commands."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from tempfile import TemporaryFile


def cache_folder(kind: str) -> Path:
    """Return ``$HFPATCH_CACHE/<kind>``, by default ``~/.cache/hfpatch/<kind>``."""
    return Path(os.environ.get("HFPATCH_CACHE", "~/.cache/hfpatch")).expanduser() / kind


def is_writable(folder: Path, what: str) -> bool:
    """Return whether files can be written to a folder, created if necessary; if not, warn that ``what`` is not cached.

    A cache is optional: work continues without it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return True
    except OSError as error:
        warnings.warn(f"{what} are not cached for the next run: {folder}: {error.strerror}", stacklevel=2)
        return False
