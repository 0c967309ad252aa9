"""Locks on run folders: one process at a time writes a run, on any file system and from any machine.

A lock is a file in ``OUT/.locks``, linked or created exclusively, which works on many network file systems where
``flock`` does not. It names its holder: host, process, start time, command. A thread of the holder updates the file's
time. A lock is stale once its process has ended, which a process on the same machine sees at once, or once it was not
renewed for five minutes; so the next command can continue after a crash.

A command holds the locks of its runs for as long as it lasts. Whoever works on one, the command or one of its workers,
also holds the lock `WORK`, as workers may end some seconds after their command.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

from hfpatch.errors import HfpatchError
from hfpatch.support.files import BOOT_ID, machine_id, temporary_path, why_not_written
from hfpatch.support.provenance import command_line

RENEW_S = 30.0
STALE_S = 300.0
"""How long a lock of another machine stays valid without being renewed."""
UNREADABLE_S = 10.0
"""How long a lock without the name of its holder stays valid: the holder is about to write it, see `_create`."""
FOLDER = ".locks"
SHARED = "folder"
"""The name of the lock on the files that all runs of a folder share; it is held briefly."""
WORK = "{}.work"
"""The name of the lock on the work on a run, by the name of the lock on the run."""
_POLL_S = 0.05
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

Holder: TypeAlias = Mapping[str, Any]


class InUseError(HfpatchError):
    """Another process has a lock."""


@contextmanager
def hold(out: Path, names: Iterable[str], *, wait_s: float = 0.0) -> Iterator[Holder]:
    """Hold several locks of a folder, or none of them; the value is their holder.

    If another process takes one of them over, which can happen after this one was suspended for minutes, this one ends
    at once, as both would write to the same files.

    Args:
        out: the folder; it and its parents are created if needed, and stay.
        names: the names of the locks: `SHARED`, or those of runs.
        wait_s: how long to wait for other processes to release them.

    Raises:
        InUseError: naming the lock and its holder.
        HfpatchError: if a lock cannot be written.
    """
    holder, held, ended = new_holder(), list[Path](), threading.Event()
    renewer = threading.Thread(target=_renew, args=(held, holder, ended), daemon=True)
    try:
        for name in names:
            held.append(out / FOLDER / name)  # first, as an interruption may come with the lock
            _take(held[-1], holder, time.monotonic() + wait_s)
        renewer.start()
        yield holder
    finally:
        ended.set()
        if renewer.ident is not None:
            renewer.join()
        for path in held:
            with suppress(OSError, HfpatchError):
                if (read_holder(path) or {}).get("token") == holder["token"]:
                    path.unlink()


def new_holder() -> Holder:
    """Return the name of this process for the locks that it is about to take."""
    return {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "pid": os.getpid(),
        "born": birth(os.getpid()) if BOOT_ID.is_file() else None,  # without it containers of one name look the same
        "command": command_line(sys.argv),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "token": uuid.uuid4().hex,
    }


def remove_lost(out: Path, name: str, token: str) -> None:
    """Remove the lock of a process that is known to have ended on another machine; here it is seen to be stale."""
    with suppress(OSError, HfpatchError):
        holder = read_holder(out / FOLDER / name) or {}
        if holder.get("token") == token and has_ended(holder) is None:
            (out / FOLDER / name).unlink()


def _take(path: Path, holder: Holder, deadline: float) -> None:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _create(path, json.dumps(holder))
        except OSError as error:
            if not (isinstance(error, FileExistsError) and path.parent.is_dir()):
                why = why_not_written(error)
                raise HfpatchError(f"{path}: cannot be written ({why}); choose another --out") from error
            other = read_holder(path)
            if other and other.get("token") == holder["token"]:
                return None  # NFS repeats a request whose answer was lost
        if other is not None and _is_gone(path, other):
            _remove_stale(path, other)
        elif other is not None and time.monotonic() >= deadline:
            what, who = _folder_and_holder(path, other)
            raise InUseError(f"{what} is in use by {who}; wait for it or end it, or choose another --out")
        elif other is not None:
            time.sleep(_POLL_S)


def _create(path: Path, text: str) -> None:
    """Create a file with its content, so that a process killed here leaves none without, unless there is one.

    File systems without hard links create it first; it is then empty for an instant.
    """
    draft = temporary_path(path, "tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        path.hardlink_to(draft)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    finally:
        draft.unlink(missing_ok=True)


def _renew(held: list[Path], holder: Holder, ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        for path in held:
            with suppress(OSError, HfpatchError):  # a network file system may be away for a while
                other = read_holder(path)
                if other is None:  # removed by hand
                    _take(path, holder, deadline=0.0)
                elif other.get("token") == holder["token"]:
                    os.utime(path)
                elif not other:  # just being written
                    continue
                else:
                    what, who = _folder_and_holder(path, other)
                    taken = f"the lock on {what} was taken over by {who} while this process was suspended"
                    print(f"hfpatch: {taken}, so it ends", file=sys.stderr, flush=True)
                    os._exit(2)


def read_holder(path: Path) -> Holder | None:
    """Return the holder of a lock, an empty one if it has no name yet, or None if the lock was released.

    Raises:
        HfpatchError: if it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError:
        return {}
    except OSError as error:  # as where another user has it
        raise HfpatchError(f"{path}: cannot be read ({error.strerror}); choose another --out") from error
    return value if isinstance(value, dict) else {}


def _remove_stale(path: Path, holder: Holder) -> None:
    """Remove the lock of a holder that has ended, unless another process has done so or has taken the lock since.

    A file that is created exclusively admits one process at a time, which looks again before it removes anything.
    """
    guard = path.with_name(f".{path.name}.stale")
    try:
        guard.open("x").close()
    except FileExistsError:
        if _is_gone(guard, {}):  # left by a crash
            guard.unlink(missing_ok=True)
        return
    except OSError:
        return  # it cannot be written, which creating the lock reports
    try:
        current = read_holder(path)
        if current is not None and current.get("token") == holder.get("token") and _is_gone(path, current):
            path.unlink(missing_ok=True)
    finally:
        guard.unlink(missing_ok=True)


def _is_gone(path: Path, holder: Holder) -> bool:
    """Return whether the holder of a lock has ended without releasing it."""
    if (ended := has_ended(holder)) is not None:
        return ended
    limit = STALE_S if holder else UNREADABLE_S
    probe = path.with_name(f".{uuid.uuid4().hex}")
    try:
        probe.touch()  # the file system's clock may differ from this machine's
        return probe.stat().st_mtime - path.stat().st_mtime > limit
    except OSError:
        return False  # released meanwhile
    finally:
        probe.unlink(missing_ok=True)


def has_ended(holder: Holder) -> bool | None:
    """Return whether a holder has ended; None unless it is, or was, a process of this machine, where that is known."""
    if holder.get("machine") != machine_id() or holder.get("born") is None:
        return None
    return bool(birth(holder.get("pid")) != holder["born"])


def birth(pid: Any) -> str | None:
    """Return when a process started, in clock ticks since boot; None if it has ended, and on systems without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _folder_and_holder(path: Path, holder: Holder) -> tuple[str, str]:
    """Return the folder that a lock protects, and who holds it, as messages call them."""
    out = path.parent.parent
    name = path.name.removesuffix(WORK.format(""))
    folder = out if "@" not in name else out.joinpath("runs", *name.split("@"))
    if not holder:
        return str(folder), "an unknown process"
    command = f"{holder.get('since')} ({holder.get('command')})"
    return str(folder), f"process {holder.get('pid')} on {holder.get('host')} since {command}"
