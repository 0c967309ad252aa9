"""The options that say where runs take place, for ``compare`` and ``pretrain``."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Jobs = Annotated[
    int | None, typer.Option(metavar="N", help="Work on N runs at a time: processes of this machine, or with --ray.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="Work on many runs at a time with Ray: on this machine, or on the cluster at auto, HOST:PORT or "
        "ray://HOST:PORT.",
    ),
]
GpusPerRun = Annotated[
    float | None, typer.Option(metavar="F", help="GPUs of each run, such as 1, 0.5 or 4; with --jobs or --ray.")
]
CpusPerRun = Annotated[int | None, typer.Option(metavar="N", help="CPU cores, and so torch's threads, of each run.")]
ProcessesPerRun = Annotated[
    int | None, typer.Option(metavar="N", help="Processes that share each training; one for each GPU if not given.")
]
LaunchConfig = Annotated[
    str | None,
    typer.Option("--accelerate-config", metavar="FILE", help="accelerate's file for these processes, as for FSDP2."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be run, and how long it would take.")]

_ADDRESS = re.compile(r"auto|local|[^=\s]+:\d*|ray://\S*")


class EngineCommand(TyperCommand):
    """A command whose ``--ray`` may come without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, ``--ray`` without an address as this machine."""
        return list(super().parse_args(ctx, with_address(args)))


def with_address(words: list[str]) -> list[str]:
    """Return the words of a command with ``local`` after each ``--ray`` that no address follows."""
    found: list[str] = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        found += [word, "local"] if word == "--ray" and not _ADDRESS.fullmatch(following) else [word]
    return found
