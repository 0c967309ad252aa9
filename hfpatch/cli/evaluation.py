"""What ``hfpatch eval`` shows."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from hfpatch.cli.tables import print_scores
from hfpatch.support.cache import cache_folder, is_writable

if TYPE_CHECKING:
    from hfpatch.evaluation import Comparison
    from hfpatch.runs.scoring import Evaluation


def print_evaluation(found: Evaluation) -> None:
    """Print every variant's scores, the patches compared with the base, and the warnings."""
    console = Console()
    for variant in found.variants.values():
        print_scores(
            variant.scores, f"{found.model['name']} with {variant.patch}" if variant.patch else found.model["name"]
        )
    if found.comparisons:
        console.print(_comparisons(found.comparisons))
    reused = sum(score.reused for variant in found.variants.values() for score in variant.scores.values())
    if reused:
        console.print(f"· {reused} answers were kept from an earlier call and not scored again", highlight=False)
    for line in found.warnings:
        console.print(f"· {line}", highlight=False, markup=False)


def _comparisons(comparisons: list[Comparison]) -> Table:
    table = Table(
        title="against the bare model, paired by document, corrected over patches and tasks", title_justify="left"
    )
    for column in ("patch", "task", "metric"):
        table.add_column(column)
    for column in ("difference", "95 % interval", "p (Holm)", "smallest visible"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for each in comparisons:
        visible = "" if each.smallest_visible is None else f"{each.smallest_visible:.4g}"
        interval = "" if math.isinf(each.low) else f"[{each.low:+.4g}, {each.high:+.4g}]"
        p = "" if each.p_holm is None else f"{each.p_holm:.3g}"
        numbers = (f"{each.difference:+.4g}", interval, p, visible)
        table.add_row(each.method, each.task, each.metric, *numbers, each.verdict)
    return table


def answer_cache() -> Path | None:
    """Return the folder of answers that no ``--output`` keeps, if it takes files."""
    folder = cache_folder("answers")
    return folder if is_writable(folder, "the answers") else None


@contextmanager
def says_how_to_go_on(kept: Path | None) -> Iterator[None]:
    """Turn Ctrl-C into one line that says where answers are kept."""
    try:
        yield
    except KeyboardInterrupt:
        means = f"the same command goes on from what is in {kept}" if kept else "nothing is kept with --no-cache"
        print(f"hfpatch: interrupted; {means}", file=sys.stderr)
        raise typer.Exit(130) from None
