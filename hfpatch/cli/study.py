"""What a pretraining and a study print when they end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from hfpatch.pretraining_recipe import point_name

LEGEND = (
    "Loss in nats per token on the held-out text, mean ± standard deviation over seeds; the share of the baseline's "
    "loss that is saved, paired by seed, with 95 % interval. * stands at 5 % after Holm's correction."
)


def print_pretraining(result: Mapping[str, Any], folder: Path) -> None:
    """Print where the model lies, or at which step the run diverged."""
    step = result["train"]["diverged_step"]
    print(f"model: {folder / 'model'}" if step is None else f"diverged at step {step}: {folder / 'metrics.jsonl'}")


def print_study(results: Mapping[str, Any], folder: Path) -> None:
    """Print a row for each variant and point of its sweep, and where the report is."""
    table = Table("variant", Column("non-embedding parameters", justify="right"), "loss", "saved")
    for row in results["rows"]:
        parameters = results["variants"][row["variant"]]["parameters"]["non_embedding"]
        name = " ".join(part for part in (row["variant"], point_name(row["point"])) if part)
        table.add_row(name, f"{parameters:,}", _loss(row), _improvement(row))
    console = Console()
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    report = folder / "report.html"
    if results["complete"] and report.is_file():
        console.print(f"report: {report}", highlight=False, markup=False, soft_wrap=True)
    else:
        missing = sum(len(row["missing"]) for row in results["rows"])
        console.print(f"{missing} runs are missing; the same command with --resume goes on", highlight=False)


def _loss(row: Mapping[str, Any]) -> str:
    ends = [f"seed {seed} diverged at step {step}" for seed, step in row["diverged"].items()]
    if row["loss"]:
        sd = row["loss"]["sd"]
        ends.insert(0, f"{row['loss']['mean']:.4f}" + (f" ± {sd:.4f}" if sd is not None else ""))
    return "; ".join(ends)


def _improvement(row: Mapping[str, Any]) -> str:
    found = row["improvement"]
    if not found:
        return ""
    interval = "" if found["low"] is None else f" [{100 * found['low']:+.2f}, {100 * found['high']:+.2f}]"
    return f"{100 * found['mean']:+.2f} %{interval}{'*' if (found['p_holm'] or 1) < 0.05 else ''}"
