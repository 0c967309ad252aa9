"""Writing files so that nothing is ever half-written, and hashing what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError

_CHUNK_BYTES = 1 << 20


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success sync it and rename it to ``path``, on failure remove it.

    Raises:
        HfpatchError: if the folder cannot be written or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        with suppress(OSError):  # where its folder is none, there is nothing to remove
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``; on success it takes the place of ``path``, on failure it is removed.

    Raises:
        HfpatchError: if the folder cannot be written or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file is in the way")
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        _swap(temporary, path)
    except OSError as error:
        raise _write_error(path, error) from error
    except HfpatchError as error:
        if isinstance(error.__cause__, OSError):  # from an atomic file inside: name the folder, not the temporary one
            raise _write_error(path, error.__cause__) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        HfpatchError: if it is missing, unreadable, not UTF-8, not JSON or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise HfpatchError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise HfpatchError(f"{path}: is not a JSON object")
    return value


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _swap(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``, setting an older folder of that name aside until the new one is in place."""
    if not path.exists():
        new.replace(path)
        return
    old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
    path.replace(old)
    try:
        new.replace(path)
    except OSError:
        old.replace(path)
        raise
    shutil.rmtree(old)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _write_error(path: Path, error: OSError) -> HfpatchError:
    return HfpatchError(f"{path}: cannot be written ({error.strerror or error}); free space or choose another folder")
