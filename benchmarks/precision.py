"""Float32 against bfloat16 trainables at the probe's learning rate: two comparisons and one table.

    python benchmarks/precision.py --out results/precision
    python benchmarks/precision.py --out /tmp/precision training.steps=10 training.warmup_steps=2 training.seeds=[0]

Runs recipes/precision.yaml with either dtype (to OUT/float32 and OUT/bfloat16, continued where they were interrupted)
and writes OUT/README.md and OUT/precision.json: for each method and dtype the share of weights that an optimiser step
really changed, by tensor group, and the loss on held-out text after the last step, with its change from the unchanged
base's.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from hfpatch.data.load import load_splits
from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.runs import compare
from hfpatch.support.files import write_json, write_text
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.bases import load_base
from hfpatch.training.validation import mean_loss

DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    clock, rows = Clock(), []
    recipe = load_recipe("precision", arguments.overrides)
    before = base_loss(recipe)
    for dtype in DTYPES:
        chosen = load_recipe("precision", [*arguments.overrides, f"training.trainable_dtype={dtype}"])
        rows += summarise(dtype, compare(chosen, arguments.out / dtype, resume=True), before)
    facts = {"recipe": recipe.model_dump(mode="json"), "base_eval_loss": before, "rows": rows}
    write_json(arguments.out / "precision.json", {**facts, "provenance": provenance(clock)})
    text = table(recipe, rows, before, arguments.overrides)
    write_text(arguments.out / "README.md", text)
    print(text)


def base_loss(recipe: Recipe) -> float:
    """Return the unchanged base's loss on the held-out text."""
    base = load_base(recipe.model.name, dtype=recipe.model.dtype)
    held_out = load_splits(recipe.data, base.tokenizer).held_out
    if held_out is None:
        raise SystemExit("the recipe holds no text out")
    return mean_loss(base.model.to(PartialState().device), held_out, batch_size=recipe.training.batch_size)


def summarise(dtype: str, results: dict[str, Any], before: float) -> list[dict[str, Any]]:
    """Return a row for each trained method: means over seeds, and the lowest survival of any seed by group."""
    rows = []
    for name, method in results["methods"].items():
        trained = [run["train"] for run in method["runs"].values() if run["train"]]
        if not trained:
            continue
        groups = sorted({group for train in trained for group in train["update_survival"]} - {"all"})
        losses = [train["final_eval_loss"] for train in trained]
        rows.append(
            {
                "method": name,
                "dtype": dtype,
                "parameters": method["parameters"]["trainable"],
                "survival": {
                    group: statistics.mean(train["update_survival"][group] for train in trained)
                    for group in [*groups, "all"]
                },
                "eval_loss": statistics.mean(losses),
                "eval_loss_by_seed": losses,
                "change": statistics.mean(losses) - before,
            }
        )
    return rows


def table(recipe: Recipe, rows: list[dict[str, Any]], before: float, overrides: Sequence[str] = ()) -> str:
    training = recipe.training
    command = shlex.join(["python", "benchmarks/precision.py", "--out", "results/precision", *overrides])
    lines = [
        "# Float32 against bfloat16 trainables",
        "",
        f"`{command}`: {recipe.description} {training.steps} steps at a "
        f"learning rate of {training.lr:g}, {len(training.seeds)} seeds. Survival is the share of weights with a "
        "gradient that an optimiser step really changed. The loss is that on held-out text, in nats per token; the "
        f"unchanged base has {before:.5f}.",
        "",
        "| method | trainables | survival | by tensor group | loss | change |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["method"], DTYPES.index(row["dtype"]))):
        groups = ", ".join(f"{group} {share:.0%}" for group, share in row["survival"].items() if group != "all")
        figures = f"{row['survival']['all']:.0%} | {groups} | {row['eval_loss']:.5f} | {row['change']:+.5f}"
        lines.append(f"| {row['method']} | {row['dtype']} | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
