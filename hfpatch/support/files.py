"""Writing files atomically, removing the temporary files of killed processes, and hashing files."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from hfpatch.errors import HfpatchError

MANIFEST = "manifest.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CHUNK_BYTES = 1 << 18  # which stays in a processor's cache
_DAY_S = 86_400  # the age from which another machine's file counts as left over; its processes cannot be asked
_UMASK = os.umask(0)
os.umask(_UMASK)  # it can only be read by setting it
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}\.(?P<kind>tmp|old)")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_IO_ERROR = re.compile(r"I/O error: (.*?)(?: \(os error \d+\))?$")


class _WriteError(HfpatchError):
    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"{path}: cannot be written ({reason}); free space or choose another folder")
        self.reason = reason


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success sync it and rename it to ``path``, on failure remove it.

    If ``path`` is a link, its target is replaced. Errors of writing become one line, see :func:`clear_about_writing`.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = temporary_path(path, "tmp")
    try:
        with clear_about_writing(path):
            if path.exists() and not (path.is_file() or path.is_dir()):  # which a user with all rights would replace
                raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _sync(temporary)
            temporary.replace(path)
    finally:
        with suppress(OSError):  # its folder may be no folder
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``; on success it replaces ``path``, on failure it is removed.

    Links and errors are as in :func:`atomic_file`.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = temporary_path(path, "tmp")
    try:
        with clear_about_writing(path):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file has this name")
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    _sync(file)
            if not path.exists():
                temporary.replace(path)
                return
            old = temporary_path(path, "old")  # kept until the new folder is in its place
            path.replace(old)
            try:
                temporary.replace(path)
            except OSError:
                old.replace(path)
                raise
            shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def clear_about_writing(path: Path) -> Iterator[None]:
    """Turn errors of the system and of safetensors into an `HfpatchError`: ``path`` cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise _WriteError(path, why_not_written(error)) from error
    except SafetensorError as error:
        if (reason := _IO_ERROR.search(str(error))) is None:
            raise
        raise _WriteError(path, reason[1]) from error
    except _WriteError as error:  # with this path, not the temporary one
        raise _WriteError(path, error.reason) from error


def why_not_written(error: OSError) -> str:
    """Return why a file cannot be written, in the system's words or, where its folder is none, in clearer ones."""
    if isinstance(error, FileExistsError) and error.filename and not Path(error.filename).is_dir():  # of mkdir
        kind = "a link to nothing" if Path(error.filename).is_symlink() else "not a folder"
        return f"{error.filename} is {kind}"
    return error.strerror or str(error)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file with an object.

    Raises:
        HfpatchError: if it is missing, unreadable, not UTF-8, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also of an integer of thousands of digits
        raise HfpatchError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise HfpatchError(f"{path}: is not a JSON object")
    return value


def printable(value: Any) -> Any:
    """Return a JSON value that every reader accepts, at any depth.

    Characters that XML or UTF-8 cannot hold are replaced; NaN, infinities and integers beyond any float become None.
    """
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable(item) for item in value]
    too_large = isinstance(value, int) and abs(value) > sys.float_info.max
    return None if too_large or (isinstance(value, float) and not math.isfinite(value)) else value


def check_data_dir(folder: Path | None) -> None:
    """Raise :class:`HfpatchError` if the folder of local data does not exist."""
    if folder is not None and not folder.is_dir():
        raise HfpatchError(f"data_dir: {folder} is not a folder; use one with copies of data sets, or leave it out")


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def json_value(value: Any) -> Any:
    """Return a value as JSON has it: NumPy's as numbers, dataclasses as mappings, keys as text, NaN and ∞ as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def hash_values(values: Any) -> str:
    """Return the SHA-256 of values as JSON; sets are sorted, values that JSON does not know are text."""
    text = json.dumps(
        values,
        sort_keys=True,
        default=lambda value: sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value),
    )
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(folder: Path) -> None:
    """Write the SHA-256 of every file of a folder to its manifest.json, as the last file."""
    write_json(folder / MANIFEST, {name: sha256_file(folder / name) for name in _files_in(folder)})


def check_manifest(folder: Path) -> None:
    """Compare every file of a folder with its manifest.json.

    Raises:
        HfpatchError: with the first file that is missing, changed or not in the manifest.
    """
    expected = read_json(folder / MANIFEST)
    for name in sorted({*expected, *_files_in(folder)}):
        if not (folder / name).is_file() or sha256_file(folder / name) != expected.get(name):
            raise HfpatchError(f"{folder / name}: damaged, its hash is not the one in {MANIFEST}")


def _files_in(folder: Path) -> list[str]:
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in paths if path.name != MANIFEST and not path.name.startswith("."))


def _sync(path: Path) -> None:
    """Flush a new file to disk and set the default permissions; only the owner can read a file of safetensors."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    with suppress(OSError):  # some file systems have no permissions
        path.chmod(0o666 & ~_UMASK)


def temporary_path(path: Path, kind: Literal["tmp", "old"]) -> Path:
    """Return a new hidden path beside ``path``, named after this machine and process, for its new or old content."""
    # not with_name, which refuses "." and "/"
    return path.parent / f".{path.name}.{machine_id()[:8]}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{kind}"


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes in a folder and below, and restore folders that they moved aside.

    Files stay if their process exists on this machine, or if they are of another machine and changed within a day.
    """
    leftovers: list[tuple[Path, re.Match[str]]] = []
    for parent, folders, files in os.walk(folder):
        matches = ((Path(parent) / entry, _TEMPORARY.fullmatch(entry)) for entry in (*folders, *files))
        leftovers += [(path, match) for path, match in matches if match]
        folders[:] = [name for name in folders if not _TEMPORARY.fullmatch(name)]
    for path, match in leftovers:
        if _is_in_use(path, match["machine"], int(match["process"])):
            continue
        with suppress(OSError):  # another process may be doing the same
            if match["kind"] == "old" and not path.with_name(match["name"]).exists():
                path.rename(path.with_name(match["name"]))
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_in_use(path: Path, machine: str, process: int) -> bool:
    try:
        if machine != machine_id()[:8] or os.name != "posix":
            return time.time() - max(file.stat().st_mtime for file in (path, *path.rglob("*"))) < _DAY_S
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user, or a file that was removed meanwhile
        return True
    return True


@functools.cache
def machine_id() -> str:
    """Return hex digits, equal for two processes exactly if they see each other's process ids."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(BOOT_ID.read_text())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
