"""Locks on run folders: one process at a time writes a run, on any file system and from any machine.

A lock is a file in ``OUT/.locks``, created exclusively, which works on many network file systems where ``flock`` does
not. It names its holder: host, process, start time, command. A thread of the holder updates the file's time. A lock is
stale once its process has ended, which a process on the same machine sees at once, or once it was not renewed for five
minutes; so the next command can continue after a crash.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from hfpatch.errors import HfpatchError
from hfpatch.support.provenance import command_line

RENEW_S = 30.0
GRACE_S = 30.0
"""How long a process may take to end after it lost a lock."""
STALE_S = 300.0
"""How long a lock of another machine stays valid without being renewed."""
UNREADABLE_S = 10.0
"""How long a lock without the name of its holder stays valid: the holder is about to write it."""
FOLDER = ".locks"
SHARED = "folder"
"""The name of the lock on what all runs of a folder share; it is held briefly."""
WHOLE = "run"
"""The name of the lock on a folder that is itself one run."""
_POLL_S = 0.05

Holder: TypeAlias = Mapping[str, Any]


@contextmanager
def hold(out: Path, names: Iterable[str], *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold several locks of a folder, or none of them.

    If another process takes one of them over, which can happen after this one was suspended for minutes, the main
    thread is interrupted as by Ctrl-C.

    Args:
        out: the folder; it is created if needed, and removed again if it is left empty.
        names: the names of the locks, see `run_lock`.
        wait_s: how long to wait for other processes to release them.

    Raises:
        HfpatchError: naming the lock and its holder.
    """
    made, ended = not out.exists(), threading.Event()
    holder = {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "born": _birth(os.getpid()),
        "command": command_line(sys.argv),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "token": uuid.uuid4().hex,
    }
    held: list[Path] = []
    renewer = threading.Thread(target=_renew, args=(held, holder, ended), daemon=True)
    try:
        for name in names:
            held.append(_take(out / FOLDER / name, holder, time.monotonic() + wait_s))
        renewer.start()
        yield
    finally:
        ended.set()
        if renewer.ident is not None:
            renewer.join()
        for path in held:
            _release(path, holder)
        with suppress(OSError):  # others may hold theirs
            (out / FOLDER).rmdir()
            if made:
                out.rmdir()


def hold_shared(out: Path) -> AbstractContextManager[None]:
    """Hold the lock on what all runs of a folder share, after waiting for any other process that holds it."""
    return hold(out, [SHARED], wait_s=STALE_S + RENEW_S)


def run_lock(out: Path, folder: Path) -> str:
    """Return the name of the lock on one run's folder."""
    return "@".join(folder.relative_to(out / "runs").parts)


def held_by_others(out: Path, names: Collection[str]) -> bool:
    """Return whether other processes hold locks on a folder, besides those of these names."""
    return any(not path.name.startswith(".") and path.name not in names for path in (out / FOLDER).glob("*"))


def _take(path: Path, holder: Holder, deadline: float) -> Path:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as stream:
                stream.write(json.dumps(holder))
            return path
        except FileExistsError:
            other = _read(path)
        except FileNotFoundError:
            continue  # another process has just removed the empty folder
        except OSError as error:
            raise HfpatchError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error
        if other is not None and _is_gone(path, other):
            _remove_stale(path, other)
        elif other is not None and time.monotonic() >= deadline:
            what, who = _locked(path), _describe(other)
            raise HfpatchError(f"{what} is in use by {who}; wait for it or end it, or choose another --out")
        elif other is not None:
            time.sleep(_POLL_S)


def _renew(held: list[Path], holder: Holder, ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        for path in held:
            with suppress(OSError, HfpatchError):  # a network file system may be away for a while
                other = _read(path)
                if other is None:  # removed by hand
                    _take(path, holder, deadline=0.0)
                elif other.get("token") == holder["token"]:
                    os.utime(path)
                else:
                    taken = f"the lock on {_locked(path)} was taken over by {_describe(other)}"
                    print(f"hfpatch: {taken} while this process was suspended, so it ends", file=sys.stderr)
                    _end(ended)
                    return


def _end(ended: threading.Event) -> None:
    """Interrupt the main thread as Ctrl-C does; end the process if that is ignored, as it is in background jobs."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()
    if not ended.wait(GRACE_S):
        os._exit(2)


def _read(path: Path) -> Holder | None:
    """Return the holder of a lock, an empty one if it cannot be read, or None if the lock was released."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _release(path: Path, holder: Holder) -> None:
    """Remove a lock if it is still that of ``holder``."""
    with suppress(OSError):
        if (_read(path) or {}).get("token") == holder["token"]:
            path.unlink()


def _remove_stale(path: Path, holder: Holder) -> None:
    """Remove the lock of a holder that is gone, unless another process does so or has taken a lock of its own since.

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
        return  # the folder was removed meanwhile, or cannot be written, which creating the lock reports
    try:
        current = _read(path)
        if current is not None and current.get("token") == holder.get("token") and _is_gone(path, current):
            path.unlink(missing_ok=True)
    finally:
        guard.unlink(missing_ok=True)


def _is_gone(path: Path, holder: Holder) -> bool:
    """Return whether the holder of a lock has ended without releasing it."""
    machine = _machine()
    if machine is not None and holder.get("machine") == machine:
        return _birth(holder.get("pid")) != holder.get("born")
    probe = path.with_name(f".{uuid.uuid4().hex}")
    try:
        probe.touch()  # the file system's clock may differ from this machine's
        return probe.stat().st_mtime - path.stat().st_mtime > (STALE_S if holder else UNREADABLE_S)
    except OSError:
        return False  # released meanwhile
    finally:
        probe.unlink(missing_ok=True)


@cache
def _machine() -> str | None:
    """Return an id of this machine since it booted and of the process namespace; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _birth(pid: Any) -> str | None:
    """Return the start time of a process, in clock ticks since boot; None if there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _locked(path: Path) -> str:
    """Return the folder that a lock protects."""
    out = path.parent.parent
    return str(out if "@" not in path.name else out.joinpath("runs", *path.name.split("@")))


def _describe(holder: Holder) -> str:
    if not holder:
        return "an unknown process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')} ({holder.get('command')})"
