"""A process that imports what workers need and forks them: importing takes each of them seconds of the processor.

Forked processes may not use threads or devices that their parent has used, so it does nothing but import.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

from hfpatch.support.lazy import collection_paused, freeze
from hfpatch.support.quiet import quiet_libraries
from hfpatch.training.interruption import end_with_parent

CODE, OUTPUT = "code", "output"
"""Files in the folder of a worker: its exit code once it has ended, and what it prints."""
_PAUSE_S = 0.1  # between looks for workers that have ended


def fork_workers() -> Path:
    """Return, in a process forked for each line of standard input, the worker's folder that the line names.

    The process that calls it ends here, after its input and all workers have ended.
    """
    quiet_libraries()
    with collection_paused():
        import hfpatch.evaluation.run
        import hfpatch.runs.engines.work  # noqa: F401  # like the line above: a worker uses them
    freeze()  # collections of workers then copy none of the memory that they share
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # before, it ended the imports of a command that was interrupted
    workers, is_open = dict[int, Path](), True
    while is_open or workers:
        if is_open and select.select([sys.stdin.fileno()], [], [], _PAUSE_S)[0]:
            lines = os.read(sys.stdin.fileno(), 2**16)
            is_open = bool(lines)
            for line in lines.splitlines():
                folder = Path(os.fsdecode(line))
                if (pid := os.fork()) == 0:
                    _become_worker(folder)
                    return folder
                workers[pid] = folder
        with suppress(ChildProcessError, FileNotFoundError):  # at the end the queue is removed
            pid, status = os.waitpid(-1, os.WNOHANG if is_open else 0)
            if pid:
                (workers.pop(pid) / CODE).write_text(str(os.waitstatus_to_exitcode(status)))
    sys.exit(0)


def _become_worker(folder: Path) -> None:
    """Give a forked process its own session, signals and output file, as a new process has."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent("process that forked this worker")
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, target)


if __name__ == "__main__":
    worker_folder = fork_workers()
    from hfpatch.runs.engines.work import begin

    begin(worker_folder)
