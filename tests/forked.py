"""Python processes for tests, forked from one that has imported everything: importing takes longer than most tests.

`python` and `start` take what follows ``python`` in a command. The ranks that ``torch.distributed.run`` or ``accelerate
launch`` start in it are forks, too. What a new process imports, or reads from its environment while it does, is tested
in processes of its own.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess

import torch

TESTS = Path(__file__).parent
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch")


def context():
    """Return the context of ``multiprocessing`` in which a process is such a fork."""
    forkserver_context = multiprocessing.get_context("forkserver")
    forkserver_context.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), before or ""])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return forkserver_context


class Forked:
    """A running process, and the files that take its output."""

    def __init__(self, arguments, env=None, cwd=None):
        self._folder = tempfile.TemporaryDirectory(prefix="hfpatch-forked-")
        self._files = [Path(self._folder.name) / name for name in ("out", "err")]
        self.arguments = [str(argument) for argument in arguments]
        given = (self.arguments, dict(os.environ if env is None else env), str(cwd or Path.cwd()), self._files)
        self._process = context().Process(target=_work, args=given)
        self._process.start()

    def wait(self, timeout=None):
        """Return its exit code and output; it is killed if it takes more than ``timeout`` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in self._files)
        self._folder.cleanup()
        return CompletedProcess(self.arguments, self._process.exitcode, out, err)


start = Forked


def python(arguments, *, timeout=300, **options):
    """Run Python with these arguments, as ``subprocess.run`` does that captures text."""
    return Forked(arguments, **options).wait(timeout)


def _work(arguments, environment, folder, files):
    """Become the process that was asked for."""
    assert "preloaded" in sys.modules
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files, start=1):
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, number)
        os.close(target)
    if "OMP_NUM_THREADS" in environment:  # which torch reads when it is imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        _run(*arguments)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def _run(*arguments):
    """Do what ``python`` does with these arguments."""
    first, *rest = [argument for argument in arguments if argument != "-u"]
    if first == "-c":
        code, *words = rest
        sys.argv = ["-c", *words]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        if rest[0] in LAUNCHERS:
            _fork_ranks()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def _fork_ranks():
    """Let torchrun, which accelerate's launcher uses, fork its processes instead of starting new ones."""
    from torch.distributed import run

    read = run.config_from_args

    def config_from_args(args):
        config, _, arguments = read(args)
        config.start_method = "fork"
        return config, _rank, arguments

    run.config_from_args = config_from_args


def _rank(*arguments):
    try:
        _run(*arguments)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        atexit._run_exitfuncs()
