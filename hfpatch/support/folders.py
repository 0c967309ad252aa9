"""Folders outside the package's modules: caches between commands, and the YAML files of tasks and recipes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from tempfile import TemporaryFile


def cache_folder(kind: str) -> Path:
    """Return ``$HFPATCH_CACHE/<kind>``, by default ``~/.cache/hfpatch/<kind>``."""
    return Path(os.environ.get("HFPATCH_CACHE") or "~/.cache/hfpatch").expanduser() / kind


def is_writable(folder: Path, what: str) -> bool:
    """Return whether files can be written to a folder, which is created; if not, warn that ``what`` is not cached."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return True
    except OSError as error:
        warnings.warn(f"{what} are not cached for the next run: {folder}: {error.strerror}", stacklevel=2)
        return False


def eval_dir() -> Path:
    """Return the folder of lm-eval task files: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    installed = package / "_resources" / "eval"
    return installed if installed.is_dir() else package.parent / "eval"


def recipes_dir() -> Path:
    """Return the folder of recipes, beside that of the tasks."""
    return eval_dir().with_name("recipes")
