"""The report of a pretraining study as a document."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hfpatch.errors import listed
from hfpatch.reporting import document as doc
from hfpatch.reporting.citations import citation_section
from hfpatch.reporting.facts import data_text, digest, provenance_facts, settings_text
from hfpatch.reporting.numbers import MOST_METHODS, NOTHING, count, duration
from hfpatch.reporting.study.answer import cautions, findings, headline, key_text, missing, value_text
from hfpatch.reporting.study.figures import figure_csv
from hfpatch.reporting.study.tables import (
    diagnostics_table,
    main_table,
    study_csv,
    sweep_table,
    terminal_table,
    variant_table,
)
from hfpatch.results.schema import StudyResults

_FIGURES = {
    "differences": (
        "Improvement at the end",
        "Improvement over the baseline at the end; to the right is better. Thick lines are plain 95 % intervals over "
        "seeds, thin ones the corrected intervals of the verdicts, small marks the single seeds. To the right of "
        "the panel: how many more non-embedding parameters than the baseline.",
    ),
    "loss": (
        "Validation loss",
        "Validation loss by step, each variant at its best point: the line is the mean over seeds, the band reaches "
        "from the smallest to the largest seed. Right: the second half, larger. A cross marks the last measurement of "
        "a seed that diverged, where the line of its variant ends too. A line far above all others leaves the right "
        "panel.",
    ),
    "improvement": (
        "Improvement by step",
        "Relative improvement over the baseline at the same step, each variant at its best point; the band is the "
        "95 % interval over seeds, and above zero is better. What leaves a panel is cut.",
    ),
    "diagnostics": (
        "Size and direction of f",
        "What f does on the evaluation text, a line a layer, from the first (light) to the last (dark), the mean over "
        "seeds: ‖f(x)‖/‖A(x)‖, and the cosine of f(x) and A(x); A is the anchor, x itself where it is the identity.",
    ),
    "spread": (
        "Spread over seeds",
        "The standard deviation of the validation loss over seeds, each variant at its best point. Seeds that diverged "
        "are left out.",
    ),
}


def study_document(study: StudyResults, drawn: Mapping[str, str] = MappingProxyType({})) -> doc.Document:
    """Build the report of a study.

    ``drawn`` has the figures as SVG documents, by name; one that is not there leaves its section out. The summary for a
    terminal needs none.
    """
    answer = doc.Text(headline(study), "headline")
    weakened, absent = tuple(cautions(study)), tuple(missing(study))
    warnings: list[doc.Block] = [doc.Sentences(weakened) if weakened else doc.Text("None.")]
    warnings += [doc.Sentences(absent, "What is missing")] if absent else []
    download = doc.Download("results.csv", "every run (CSV)", study_csv(study))
    unswept = () if any(row.point for row in study.rows) else (doc.Text("One point a variant: nothing was swept."),)
    points = sorted(set(study.tried_counts.values())) or [0]
    wall = study.provenance.get("wall_s")
    # how many tokens the complete runs were trained on
    seen = {run.train.tokens for run in study.runs if run.outcome == "complete" and run.train is not None}
    tokens = " to ".join(count(each) for each in sorted({min(seen), max(seen)})) if seen else ""
    sections = (
        doc.Section("answer", "Answer", (answer, doc.Findings(findings(study), what="variants"))),
        doc.Section("protocol", "Protocol and provenance", (doc.Facts(_protocol(study, tokens)),)),
        doc.Section("warnings", "Warnings", tuple(warnings)),
        doc.Section("results", "Results", (main_table(study), download, variant_table(study))),
        *(each for name in ("differences", "loss", "improvement") for each in _figure(study, drawn, name)),
        doc.Section("sweep", "Sweep", (*unswept, sweep_table(study))),
        *_figure(study, drawn, "diagnostics", diagnostics_table(study)),
        *_figure(study, drawn, "spread"),
        doc.Section("environment", "Environment", (doc.Facts(tuple(provenance_facts(study.provenance))),)),
    )
    return doc.Document(
        title=study.name or "Pretraining study",
        parts=(doc.Part(sections),),
        closing=(citation_section([study]),),
        description=study.description,
        complete=study.complete,
        glance=(
            ("Baseline", study.baseline),
            ("Variants", count(len(study.variants))),
            *((("Points a variant", listed(list(map(count, points)))),) if points[-1] > 1 else ()),
            ("Seeds", count(len(study.seeds))),
            ("Tokens a run", tokens or NOTHING),
            ("Wall time", duration(wall) if isinstance(wall, int | float) else NOTHING),
        ),
        summary=(terminal_table(study), answer, doc.Sentences(absent)),
    )


def _figure(study: StudyResults, drawn: Mapping[str, str], name: str, *beside: doc.Block) -> tuple[doc.Section, ...]:
    """Return the section of a figure with the blocks ``beside`` it; none where it is not drawn."""
    if name not in drawn:
        return ()
    title, caption = _FIGURES[name]
    others = len(study.others)
    if others > MOST_METHODS:
        caption += f" Of {others} variants the first {MOST_METHODS} are drawn; the tables and the data have all."
    figure = doc.Figure(name, title, caption, drawn[name], figure_csv(name, study))
    return (doc.Section(name, title, (figure, *beside)),)


def _protocol(study: StudyResults, tokens: str) -> tuple[doc.Fact, ...]:
    """Return data and settings of training and measurement."""
    size, name = study.tokenizer.get("vocab_size"), study.tokenizer.get("path") or study.tokenizer.get("name")
    tokenizer = [str(name)] if name else []
    tokenizer += [f"{count(size)} tokens"] if isinstance(size, int) else []
    tokenizer += [f"SHA-256 {digest(study.tokenizer['sha256'])}"] if study.tokenizer.get("sha256") else []
    # the values tried: lr 0.001, 0.002 × weight_decay 0.1, by variant where they differ
    by_axes: dict[str, list[str]] = {}
    for variant in study.variants:
        axes: dict[str, dict[str, None]] = {}
        for key, value in (item for point in study.tried(variant) for item in point.items()):
            axes.setdefault(key_text(key), {})[value_text(value)] = None
        text = " × ".join(f"{key} {', '.join(values)}" for key, values in axes.items())
        by_axes.setdefault(text or NOTHING, []).append(variant)
    sweep = "; ".join(f"{', '.join(names)}: {text}" for text, names in by_axes.items())
    if len(by_axes) == 1:
        sweep = next(iter(by_axes)).removeprefix(NOTHING)
    facts = [
        ("Baseline", study.baseline),
        ("Data", data_text(study.data)),
        ("Evaluation data", data_text(study.evaluation_data or {})),
        ("Tokens a run", tokens),
        ("Tokenizer", ", ".join(tokenizer)),
        *((f"Batch plan, seed {seed}", f"SHA-256 {digest(plan)}") for seed, plan in study.plans.items()),
        ("Architecture, common to all", settings_text(study.common_architecture)),
        ("Training", settings_text(study.training)),
        ("Sweep", sweep),
        ("Seeds", ", ".join(map(str, study.seeds))),
        ("Trained at commit", ", ".join(dict.fromkeys(run.commit for run in study.runs if run.commit))),
    ]
    return tuple((label, value) for label, value in facts if value)
