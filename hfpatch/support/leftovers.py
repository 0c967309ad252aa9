"""What is left of a file or folder that a killed process was writing: named so that the next start can remove it."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}\.(?P<kind>tmp|old)")
_DAY_S = 86_400


def temporary_path(path: Path, kind: Literal["tmp", "old"]) -> Path:
    """Return a free hidden path beside ``path`` that names this machine and this process.

    ``tmp`` is what will take the place of ``path``, ``old`` what had it before.
    """
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{kind}")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder and below; put back what they had only set aside.

    What a running process writes stays: of this machine, whatever belongs to a process that there is; of another one,
    whatever changed within a day.
    """
    for path, name, kind in list(_leftovers(folder)):
        with suppress(OSError):  # another process may be doing the same
            if kind == "old" and not path.with_name(name).exists():
                path.rename(path.with_name(name))
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _leftovers(folder: Path) -> Iterator[tuple[Path, str, str]]:
    for parent, folders, files in os.walk(folder):
        for entry in (*folders, *files):
            found, path = _NAME.fullmatch(entry), Path(parent) / entry
            if found and not _is_in_use(path, found["machine"], int(found["process"])):
                yield path, found["name"], found["kind"]
        folders[:] = [name for name in folders if not _NAME.fullmatch(name)]


def _is_in_use(path: Path, machine: str, process: int) -> bool:
    if machine == _machine() and os.name == "posix":
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except OSError:  # another user's
            return True
        return True
    with suppress(OSError):
        newest = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
        return time.time() - newest < _DAY_S
    return True


@functools.cache
def _machine() -> str:
    """Return 8 hex digits that two processes share if and only if they see each other's process numbers."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
