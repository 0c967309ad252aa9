"""``report.md``: the report for a terminal, a repository page or a diff."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple

from hfpatch.reporting import captions
from hfpatch.reporting.answer import Finding, answer
from hfpatch.reporting.facts import Fact, environment_facts, protocol_facts
from hfpatch.reporting.results import Results
from hfpatch.reporting.tables import Cell, MainTable, main_table, method_table, paired_table

_SPECIAL = re.compile(r"([\\`*|~$]|\](?=[(\[:])|(?<!\w)_|_(?!\w))")
_LINE_START = re.compile(r"^(\d*)([#+=>.)-])")


def escape(text: str) -> str:
    """Return ``text`` on one line, with nothing left in it that Markdown or HTML would act on within a line."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", line)


def block(text: str) -> str:
    """Return ``text`` escaped to begin a block: no heading, list or rule comes of it."""
    return _LINE_START.sub(r"\1\\\2", escape(text))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 1) -> str:
    """Return a Markdown table of escaped cells; columns from ``numbers_from`` on are aligned right."""
    rule = ["---" if i < numbers_from else "---:" for i in range(len(headings))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def markdown(results: Results, figures: Sequence[str]) -> str:
    """Return the report as Markdown.

    Args:
        results: the run.
        figures: the names of the figures that stand in ``figures/`` beside it.
    """
    return "\n\n".join(block for block in _blocks(results, figures) if block) + "\n"


def _blocks(results: Results, figures: Sequence[str]) -> Iterator[str]:
    found = answer(results)
    yield f"# {escape(results.name) or 'Comparison'}"
    yield block(results.description)
    yield f"## Answer\n\n{block(found.headline)}"
    yield _findings(found.against_baseline)
    if found.against_others:
        yield f"Between methods:\n\n{_findings(found.against_others)}"
    yield f"## Protocol and provenance\n\n{_facts(protocol_facts(results))}"
    yield f"## Warnings\n\n{_list(results.warnings) or 'None.'}"
    if results.missing:
        yield f"### What is missing\n\n{_list(results.missing)}"
    yield f"## Results\n\n{_main(main_table(results))}\n\n{escape(captions.MAIN_TABLE)}"
    yield _methods(results)
    for name in figures:
        title, caption = captions.FIGURES[name]
        yield f"## {title}\n\n![{title}](figures/{name}.svg)\n\n{escape(caption)}"
    yield f"## Paired differences\n\n{_paired(results)}"
    yield f"## Environment\n\n{_facts(environment_facts(results))}"


def _findings(findings: Iterable[Finding]) -> str:
    return "\n".join(f"- **{escape(finding.method)}** {escape(finding.rest)}" for finding in findings)


def _facts(facts: Iterable[Fact]) -> str:
    return "\n".join(f"- {block(label)}: {escape(value)}" for label, value in facts)


def _list(sentences: Iterable[str]) -> str:
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
    return f"{table(headings, rows, numbers_from=5)}\n\n{escape(captions.PAIRED)}" if rows else "None was made."
