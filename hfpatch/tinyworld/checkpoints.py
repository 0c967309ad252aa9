"""The pretrained checkpoints that come with the package, and their hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, nearest
from hfpatch.support.files import read_json, sha256_file

CHECKPOINTS = ("gpt-neox", "gpt2")
_FOLDER = Path(__file__).parent
MANIFEST = _FOLDER / "manifest.json"


def checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint, in Hugging Face format: weights, config and tokenizer.

    Raises:
        HfpatchError: if there is no such checkpoint.
    """
    if name not in CHECKPOINTS:
        known = ", ".join(CHECKPOINTS)
        raise HfpatchError(f"tinyworld has no checkpoint {name!r}{nearest(name, CHECKPOINTS)}; it has {known}")
    return _FOLDER / "checkpoints" / name


def manifest() -> dict[str, Any]:
    """Read the manifest: the seed and settings of the build, and the SHA-256 of every file it wrote."""
    return dict(read_json(MANIFEST))


def built_files() -> dict[str, str]:
    """Return the SHA-256 of every built file that is there now, by its path inside the room."""
    folders = (_FOLDER / "checkpoints", _FOLDER / "items")
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(_FOLDER).as_posix(): sha256_file(path) for path in files}
