"""The command that shows many runs on one page: ``explore``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explore(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Folders that compare, pretrain or eval wrote, or that hold such."),
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("explore.html"),
) -> None:
    """Write one page over many runs: gains against parameters, time and memory, with filters.

    It is made from each folder's results.json alone; a row opens its run's report.

    Example: hfpatch explore runs/* --out explore.html
    """
    from hfpatch.reporting.explorer.page import explorer_summary, write_explorer
    from hfpatch.reporting.terminal import print_document

    written = write_explorer(places, out)
    print_document(explorer_summary(written))
    print(f"page: {written.page}")
