"""Model cards that tell what a run measured: one for the whole run, and one for each of its patches."""

from __future__ import annotations

from pathlib import Path

from hfpatch.errors import HfpatchError
from hfpatch.reporting.answer import answer
from hfpatch.reporting.facts import protocol_facts
from hfpatch.reporting.numbers import NOTHING, count, part_text, score
from hfpatch.reporting.results import MethodOutcome, Results
from hfpatch.reporting.tables import Cell, cell_of, main_table, scale_of_task, unit_of
from hfpatch.support.files import read_json, write_text
from hfpatch.support.markdown import block, escape, table
from hfpatch.surgery.card import TAGS, Measured, base_licence, front, hub_id, patch_card, shown_base

_DATA = ("Data", "Batch plan", "Training")
_HEADINGS = ("task", "metric", "n", "base", "this patch", "difference over all seeds", "verdict")


def write_patch_cards(run_dir: Path, results: Results) -> list[Path]:
    """Write the card of every saved patch of a run again, with its data and its results; return the cards."""
    written = []
    for method in results.methods.values():
        for seed in method.runs:
            folder = run_dir / "runs" / method.name / f"seed-{seed}" / "patch"
            if "/" not in method.name and (folder / "patch.json").is_file():
                card = _patch_card(results, method, seed, folder)
                if card is not None:
                    write_text(folder / "README.md", card)
                    written.append(folder / "README.md")
    return written


def run_card(results: Results) -> str:
    """Return the card of a repository that holds a whole run."""
    name = shown_base(str(results.model.get("name") or "the base"))
    found, main = answer(results), main_table(results)
    headings = ["method", "trainable", *(escape(f"{h.task}, {h.metric}") for h in main.headings)]
    rows = [[escape(row.method), row.trainable, *(escape(_told(cell)) for cell in row.cells)] for row in main.rows]
    header = {"library_name": "peft", "base_model": hub_id(name), "license": base_licence(name), "tags": TAGS}
    sections = [
        front(header),
        f"# {escape(results.name)}: patches for {escape(name)}",
        block(results.description),
        f"## Answer\n\n{block(found.headline)}",
        "\n".join(f"- **{escape(each.method)}** {escape(each.rest)}" for each in found.against_baseline),
        f"## Results\n\n{table(headings, rows)}",
        "`report.html` is the whole report, `report.md` its twin; `results.csv` and `results.json` are the numbers.",
        "## How to load a patch\n\nEach patch stands in `runs/METHOD/seed-N/patch`, with a card of its own:\n\n"
        "    import hfpatch\n    from huggingface_hub import snapshot_download\n\n"
        '    hfpatch.load_patch(model, snapshot_download("this repository") + "/runs/METHOD/seed-0/patch")',
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _told(cell: Cell) -> str:
    return " ".join(part for part in (cell.value, cell.difference, cell.verdict_text) if part)


def _patch_card(results: Results, method: MethodOutcome, seed: int, folder: Path) -> str | None:
    try:
        manifest = read_json(folder / "patch.json")
        return patch_card(manifest["base"], manifest["adapters"], _measured(results, method, seed))
    except (HfpatchError, KeyError, TypeError):
        return None  # a broken patch keeps the card that it has


def _measured(results: Results, method: MethodOutcome, seed: int) -> Measured:
    facts = [fact for fact in protocol_facts(results) if fact[0].startswith(_DATA)]
    plan = f"Batch plan, seed {seed}"
    return Measured(
        title=method.name,
        method=[
            ("Parts", " + ".join(map(part_text, method.parts))),
            ("Trained parameters", count(method.trainable)),
            ("Seed", str(seed)),
            ("Run", f"{results.name}, protocol {results.protocol.replace('_', ' ')}"),
        ],
        data=[fact for fact in facts if not fact[0].startswith("Batch plan") or fact[0] == plan],
        headings=_HEADINGS,
        results=[_result(results, method, seed, task) for task in results.tasks],
        notes=results.warnings,
    )


def _result(results: Results, method: MethodOutcome, seed: int, task: str) -> list[str]:
    info, scale = results.tasks[task], scale_of_task(results, task)
    outcome = method.runs[seed].evaluation.get(task)
    base = results.mean(results.baseline, task) if results.baseline is not None else None
    cell, unit = cell_of(results, method.name, task), unit_of(results, task)
    return [
        task,
        info.primary,
        count(info.n),
        score(base, scale),
        score(outcome.metrics.get(info.primary), scale) if outcome is not None else NOTHING,
        f"{cell.difference} {unit}" if cell.difference else NOTHING,
        cell.verdict_text or NOTHING,
    ]
