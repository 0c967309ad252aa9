"""``hfpatch`` and ``python -m hfpatch``: the command line, with every mistake in one line."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

from hfpatch.errors import HfpatchError, is_out_of_memory
from hfpatch.support.lazy import needing_lab
from hfpatch.support.ranks import prints_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 2 a mistake in what was given, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack −, · and letters of names
            stream.reconfigure(errors="replace")
    try:
        with needing_lab():
            return _run(arguments)
    except HfpatchError as error:
        return _refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split()) or "it is all in use"
        return _refuse(f"not enough memory ({reason[-200:]}); take a smaller size, batch or block")
    except OSError as error:  # of a path that was given, wherever it is first used
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.EROFS, errno.ENOSPC):
            raise
        return _refuse(f"{str(error.filename or 'a file')[:200]}: {error.strerror}; choose another path")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _refuse(mistake: str) -> int:
    """Print a mistake in one line, where there are several processes one of them, and return the exit code."""
    if prints_errors():
        print(f"hfpatch: error: {' '.join(mistake.split())}", file=sys.stderr, flush=True)
    return 2


def _run(arguments: Sequence[str] | None) -> int:
    from hfpatch.cli.app import app
    from hfpatch.cli.help import CommandLineError

    if os.environ.get("_HFPATCH_COMPLETE"):  # a shell asks for completions
        from hfpatch.cli.help import prepare_completion

        prepare_completion()
    try:
        code = app(None if arguments is None else list(arguments), prog_name="hfpatch", standalone_mode=False)
    except CommandLineError as error:
        if prints_errors():
            from typer.rich_utils import rich_format_error

            rich_format_error(error)  # type: ignore[arg-type]  # the class found above
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
