"""Model cards with results: one for a whole run, and one for each of its patches."""

from __future__ import annotations

from pathlib import Path

from hfpatch.errors import HfpatchError
from hfpatch.reporting.comparison.answer import answer, headline_table
from hfpatch.reporting.comparison.tables import score_table
from hfpatch.reporting.comparison.tuning import chosen_facts
from hfpatch.reporting.facts import protocol_facts
from hfpatch.reporting.markdown import markdown_table
from hfpatch.reporting.numbers import (
    NOTHING,
    change_of,
    change_text,
    count,
    documents_text,
    part_text,
    scale_in,
    score,
    verdict_text,
)
from hfpatch.reporting.paths import cut_paths, paths_in
from hfpatch.results.cautions import rates_sentence
from hfpatch.results.comparison import ComparisonResults
from hfpatch.support.files import read_json, write_text
from hfpatch.support.markup import block, escape
from hfpatch.surgery.card import TAGS, Measured, base_licence, front, hub_id, patch_card, shown_base
from hfpatch.surgery.manifest import MANIFEST, read_manifest


def write_patch_cards(run_dir: Path, results: ComparisonResults) -> list[Path]:
    """Write the card of every saved patch of a run again, with its data and its results; return the cards.

    Paths of this machine are cut down to names, as a patch is shared, also from a copy outside the run. A patch that is
    damaged keeps the card that it has.
    """
    written, paths = [], paths_in(read_json(run_dir / "results.json"))
    for name, seed in ((name, seed) for name, method in results.methods.items() for seed in method.runs):
        folder = run_dir / "runs" / name / f"seed-{seed}" / "patch"
        if "/" in name or not (folder / MANIFEST).is_file():
            continue
        try:
            manifest = read_manifest(folder / MANIFEST)
        except HfpatchError:
            continue
        # of each task the scores by the measure that decides it, and the verdict
        method, rows = results.methods[name], []
        for task, info in results.tasks.items():
            metric = results.deciding[task].metric
            scale, run = scale_in(results, task, metric), method.runs[seed].evaluation.get(task)
            base = results.mean(results.baseline, task, metric) if results.baseline is not None else None
            verdict = results.verdict(name, task, results.baseline)
            is_measured = verdict is not None and verdict.n > 0
            scores = score(base, scale), score(run.metrics.get(metric), scale) if run is not None else NOTHING
            change = change_text(change_of(results, verdict, plain=False)) if is_measured and verdict else NOTHING
            outcome = verdict_text(results, verdict) if verdict is not None else NOTHING
            rows.append([task, metric, documents_text(info.n, info.clusters), *scores, change, outcome])
        labels = ("Data", f"Batch plan, seed {seed}", "Training")
        measured = Measured(
            title=name,
            method=[
                ("Parts", " + ".join(map(part_text, method.parts))),
                ("Trained parameters", count(method.trainable)),
                ("Seed", str(seed)),
                *chosen_facts(results, name),
                ("Run", f"{results.name}, protocol {results.protocol.replace('_', ' ')}"),
            ],
            data=[(label, value) for label, value in protocol_facts(results) if label in labels],
            headings=("task", "metric", "n", "base", "this patch", "difference over all seeds", "verdict"),
            results=rows,
            notes=results.warnings,
        )
        card, path = cut_paths(patch_card(manifest.base, manifest.adapters, measured), paths), folder / "README.md"
        if not path.is_file() or path.read_bytes() != card.encode("utf-8"):
            write_text(path, card)
        written.append(path)
    return written


def run_card(results: ComparisonResults) -> str:
    """Return the card of a repository that holds a whole run."""
    given = str(results.model.get("name") or "")
    name = shown_base(given) or "the base"
    of_hub = hub_id(name) if results.model.get("revision") else None  # a folder has no commit
    header = {"library_name": "peft", "base_model": of_hub, "license": base_licence(given), "tags": TAGS}
    sections = [
        front(header),
        f"# {escape(results.name)}: patches for {escape(name)}",
        block(results.description),
        f"## Answer\n\n{block(answer(results))}",
        markdown_table(headline_table(results)),
        block(rates_sentence(results)),
        f"## Scores\n\n{markdown_table(score_table(results))}",
        "`report.html` is the whole report, `report.md` the same as Markdown; `results.csv` and `results.json` are the "
        "numbers.",
        "## How to load a patch\n\nEach patch is in `runs/METHOD/seed-N/patch`, with a card of its own:\n\n"
        "    import hfpatch\n    from huggingface_hub import snapshot_download\n\n"
        '    hfpatch.load_patch(model, snapshot_download("this repository") + "/runs/METHOD/seed-0/patch")',
    ]
    return "\n\n".join(section for section in sections if section) + "\n"
