"""Writing files so that nothing is ever half-written, and hashing what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hfpatch.errors import HfpatchError
from hfpatch.support.leftovers import temporary_path

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 18
_IO_ERROR = re.compile(r"I/O error: (.*?)(?: \(os error \d+\))?$")


class _WriteError(HfpatchError):
    reason: object


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success sync it and rename it to ``path``, on failure remove it.

    A link is followed: what it names is replaced, not the link.

    Raises:
        HfpatchError: if the folder cannot be written or the disk is full.
    """
    path = path.resolve() if path.is_symlink() else path
    temporary = temporary_path(path, "tmp")
    try:
        with clear_about_writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _sync(temporary)
            temporary.replace(path)
    finally:
        with suppress(OSError):  # where its folder is none, there is nothing to remove
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``; on success it takes the place of ``path``, on failure it is removed.

    A link is followed: the folder that it names is replaced, not the link.

    Raises:
        HfpatchError: if the folder cannot be written or the disk is full.
    """
    path = path.resolve() if path.is_symlink() else path
    temporary = temporary_path(path, "tmp")
    try:
        with clear_about_writing(path):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file is in the way")
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    _sync(file)
            _swap(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def clear_about_writing(path: Path) -> Iterator[None]:
    """Say in one line that ``path`` cannot be written and why, also where a file inside or safetensors fails."""
    try:
        yield
    except OSError as error:
        raise _write_error(path, error.strerror or error) from error
    except SafetensorError as error:
        if (reason := _IO_ERROR.search(str(error))) is None:
            raise
        raise _write_error(path, reason[1]) from error
    except _WriteError as error:  # name this path, not the temporary one
        raise _write_error(path, error.reason) from error


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


def check_data_dir(folder: Path | None) -> None:
    """Refuse a folder of local data that is not there.

    Raises:
        HfpatchError: if it is not.
    """
    if folder is not None and not folder.is_dir():
        raise HfpatchError(
            f"data_dir: {folder} is not a folder; name one that holds copies of data sets, or leave it out"
        )


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def write_manifest(folder: Path) -> None:
    """Write the SHA-256 of every file of a folder to its manifest.json, the last file to be written there."""
    write_json(folder / MANIFEST, {name: sha256_file(folder / name) for name in _files_in(folder)})


def check_manifest(folder: Path) -> None:
    """Compare every file of a folder with its manifest.json.

    Raises:
        HfpatchError: naming the first file that is missing, changed or not in the manifest.
    """
    expected = read_json(folder / MANIFEST)
    if not isinstance(expected, dict):
        raise HfpatchError(f"{folder / MANIFEST}: damaged, as it is no JSON object")
    for name in sorted({*expected, *_files_in(folder)}):
        if not (folder / name).is_file() or sha256_file(folder / name) != expected.get(name):
            raise HfpatchError(f"{folder / name}: damaged, as its hash is not the one in {MANIFEST}")


def _files_in(folder: Path) -> list[str]:
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in paths if path.name != MANIFEST and not path.name.startswith("."))


def _swap(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``, setting an older folder of that name aside until the new one is in place."""
    if not path.exists():
        new.replace(path)
        return
    old = temporary_path(path, "old")
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


def _write_error(path: Path, reason: object) -> _WriteError:
    error = _WriteError(f"{path}: cannot be written ({reason}); free space or choose another folder")
    error.reason = reason
    return error
