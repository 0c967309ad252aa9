"""Options of ``compare`` and ``pretrain`` for concurrent runs and for ``--dry-run``."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be run, and how long it would take.")]

if TYPE_CHECKING:
    from pathlib import Path

    from hfpatch.recipes.comparison import Recipe
    from hfpatch.recipes.pretraining import StudyRecipe

_ADDRESS = re.compile(r"auto|local|[^=\s]+:\d*|ray://\S*")


class EngineCommand(TyperCommand):
    """A command whose ``--ray`` may come without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, with ``local`` after each ``--ray`` that no address follows.

        Where the recipe comes first, the next word is an address or, with ``=``, an override.
        """
        words, recipe_is_first = list[str](), not "".join(args[:1]).startswith("-")
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            words.append(word)
            is_address = recipe_is_first and following and not following.startswith("-") and "=" not in following
            if word == "--ray" and not (is_address or _ADDRESS.fullmatch(following)):
                words.append("local")
        return list(super().parse_args(ctx, words))


def print_preview(recipe: Recipe | StudyRecipe, out: Path, **options: Any) -> None:
    """Print the graph of units, a line each, and how long they take on one device and on more.

    ``options`` are those of `hfpatch.runs.preview`.
    """
    from hfpatch.cli.progress import choose_progress
    from hfpatch.reporting.numbers import duration
    from hfpatch.runs import preview

    with choose_progress() as progress:
        shown = preview(recipe, out, progress=progress, **options)
    rows = [("#", "unit", "run", "needs", "about")]
    for number, step in enumerate(shown.steps, start=1):
        unit = step.unit
        about = "done" if unit.is_complete() else "" if unit.marker is None else duration(step.seconds)
        action = unit.action.replace("_", " ") + " (if needed)" * step.optional
        action += f" to {unit.scale:g}" if unit.action == "rewind" else ""
        ranges: list[list[int]] = []  # of the units that it needs: 1, 3-9
        for needed in step.needs:
            if ranges and needed == ranges[-1][-1] + 1:
                ranges[-1][1:] = [needed]
            else:
                ranges.append([needed])
        needs = ", ".join("-".join(map(str, numbers)) for numbers in ranges)
        rows.append((str(number), action, unit.run.name, needs, about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    complete = sum(step.unit.is_complete() for step in shown.steps)
    optional = [step.unit.action for step in shown.steps if step.optional]
    reasons = {"tune": "tuning needs other rates", "train": "a look asks for more seeds"}
    wanted = " or ".join(reason for action, reason in reasons.items() if action in optional)
    extra = f", {len(optional)} of them only if {wanted} (not counted below)" if optional else ""
    print(f"{len(shown.steps)} units, {complete} of them complete{extra}")
    for devices in sorted({1, 2, 4, 8, shown.devices}):
        chosen = " <- as asked" * (devices == shown.devices)
        print(f"on {devices} at a time: {duration(shown.duration(devices))}{chosen}")
    if shown.source:
        print(f"times: {shown.source}; loading and saving are left out")
