"""``report.md``: the report for a terminal, a repository page or a diff."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple

from hfpatch.reporting import captions
from hfpatch.reporting.answer import Finding, answer
from hfpatch.reporting.facts import Fact, environment_facts, protocol_facts
from hfpatch.reporting.merging import Check
from hfpatch.reporting.page import Material, anchor, labelled, page, sides_row
from hfpatch.reporting.results import Results
from hfpatch.reporting.tables import Cell, MainTable, main_table, method_table, paired_table
from hfpatch.support.markdown import block, escape, table


def markdown(material: Sequence[Material], checks: Sequence[Check] = ()) -> str:
    """Return the report as Markdown; its figures stand in ``figures/`` beside it.

    Args:
        material: the runs that stand side by side; one where they share a table.
        checks: what several runs have in common.
    """
    blocks = [block for block in _opening(material, checks) if block]
    for place, each in enumerate(material):
        blocks += [block for block in _blocks(each, anchor(material, place)) if block]
    return "\n\n".join(blocks) + "\n"


def _opening(material: Sequence[Material], checks: Sequence[Check]) -> Iterator[str]:
    whole = page(material, checks)
    yield f"# {escape(whole.title)}"
    yield block(whole.description)
    if checks:
        headings = ["of the runs", "verdict", *map(escape, whole.labels), "what follows"]
        rows = [[check.what, check.verdict, *map(escape, check.values), escape(check.consequence)] for check in checks]
        yield f"## Comparability\n\n{block(whole.comparability)}\n\n{table(headings, rows, numbers_from=len(headings))}"


def _blocks(material: Material, prefix: str) -> Iterator[str]:
    results = material.results
    found = answer(results)
    if material.title:
        yield f"# Run {escape(material.title)}"
    yield f"## Answer\n\n{block(found.headline)}"
    yield findings_list(found.against_baseline)
    if found.against_others:
        yield f"Between methods:\n\n{findings_list(found.against_others)}"
    yield f"## Protocol and provenance\n\n{_labelled(material, protocol_facts)}"
    yield f"## Warnings\n\n{sentences_list(results.warnings) or captions.no_warnings(results)}"
    if results.missing:
        yield f"### What is missing\n\n{sentences_list(results.missing)}"
    yield f"## Results\n\n{_main(main_table(results))}\n\n{escape(captions.main_table(results))}"
    yield _methods(results)
    for name in material.figures:
        title, caption = captions.FIGURES[name]
        told = escape(caption + captions.left_out(results))
        yield f"## {title}\n\n![{title}](figures/{prefix}{name}.svg)\n\n{told} [Data](figures/{prefix}{name}.csv)."
    yield f"## Paired differences\n\n{_paired(results)}"
    if material.samples.sides:
        yield f"## What changed sides\n\n{_sides(material)}"
    yield f"## Environment\n\n{_labelled(material, environment_facts)}"


def _labelled(material: Material, facts: Callable[[Results], list[Fact]]) -> str:
    told = labelled(material, facts)
    return "\n\n".join((f"### {escape(label)}\n\n" if label else "") + facts_list(each) for label, each in told)


def _sides(material: Material) -> str:
    headings = ["method", "task", "gained", "lost", "net", "documents", "seeds"]
    rows = [list(map(escape, astuple(sides_row(each)))) for each in material.samples.sides]
    return f"{table(headings, rows, numbers_from=2)}\n\n{escape(captions.SAMPLES)}"


def findings_list(findings: Iterable[Finding]) -> str:
    """Return findings as a list."""
    return "\n".join(f"- **{escape(finding.subject)}** {escape(finding.rest)}" for finding in findings)


def facts_list(facts: Iterable[Fact]) -> str:
    """Return labelled lines as a list."""
    return "\n".join(f"- {block(label)}: {escape(value)}" for label, value in facts)


def sentences_list(sentences: Iterable[str]) -> str:
    """Return sentences as a list."""
    return "\n".join(f"- {block(sentence)}" for sentence in sentences)


def _main(main: MainTable) -> str:
    tasks = [f"{escape(h.task)} <br> {escape(h.metric)}, n = {h.n} <br> {h.better}, [{h.unit}]" for h in main.headings]
    rows = [
        [escape(row.method), row.trainable, *map(_cell, row.cells), row.tokens_per_s, row.peak_memory]
        for row in main.rows
    ]
    return table(["method", "trainable", *tasks, "tokens/s", "peak memory"], rows)


def _cell(cell: Cell) -> str:
    return " <br> ".join(escape(part) for part in (cell.value, cell.difference, cell.verdict_text) if part)


def _methods(results: Results) -> str:
    headings = ["method", "parts", "form", "matched to", "trainable", "updates kept", "final loss", "training time"]
    rows = [list(map(escape, astuple(row))) for row in method_table(results)]
    return "### Methods\n\n" + table(headings, rows, numbers_from=4)


def _paired(results: Results) -> str:
    headings = ["method", "reference", "task", "metric", "verdict", "difference", "in its unit", "p", "p (Holm)"]
    headings += ["visible from", "n", "seeds", "test"]
    rows = [list(map(escape, astuple(row)[1:])) for row in paired_table(results)]
    return (
        f"{table(headings, rows, numbers_from=5)}\n\n{escape(captions.paired(results))}" if rows else "None was made."
    )
