"""Options of ``compare`` and ``pretrain`` for concurrent runs."""

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
    int | None, typer.Option(metavar="N", help="Processes that share each run; one for each GPU if not given.")
]
LaunchConfig = Annotated[
    str | None,
    typer.Option("--accelerate-config", metavar="FILE", help="accelerate's file for these processes, as for FSDP2."),
]

_ADDRESS = re.compile(r"|auto|local|[^=\s]+:\d*|ray://\S*")


class EngineCommand(TyperCommand):
    """A command whose ``--ray`` may come without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, with ``local`` after each ``--ray`` that no address follows.

        Where the recipe comes first, the next word is an address or, with ``=``, an override.
        """
        words, recipe_is_first = list[str](), not "".join(args[:1]).startswith("-")
        for word, following in zip_longest(args, args[1:], fillvalue="-"):
            words.append(word)
            is_address = recipe_is_first and not following.startswith("-") and "=" not in following
            if word == "--ray" and not (is_address or _ADDRESS.fullmatch(following)):
                words.append("local")
        return list(super().parse_args(ctx, words))
