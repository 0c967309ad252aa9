"""The report of ``hfpatch eval``: the scores of each model, patches compared with the base; one of several calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hfpatch.errors import listed
from hfpatch.reporting.citations import citation_section
from hfpatch.reporting.differing import measured_differently
from hfpatch.reporting.document import Cell, Column, Document, Fact, Facts, Part, Row, Section, Sentences, Table
from hfpatch.reporting.facts import digest, evaluation_text, gguf_text, provenance_facts, settings_text
from hfpatch.reporting.numbers import (
    NOTHING,
    Change,
    Scale,
    count,
    decimal,
    documents_text,
    interval_of,
    p_text,
    signed_size,
    significant,
)
from hfpatch.reporting.tabular import csv_text
from hfpatch.results.cautions import PRODUCTS
from hfpatch.results.evaluation import EvaluationResults
from hfpatch.results.identity import base_identity
from hfpatch.results.parts import Comparison, TaskResult
from hfpatch.results.verdicts import Verdict


def evaluation_document(results: EvaluationResults) -> Document:
    """Return the scores of every model, the differences between them, the warnings and how it was measured."""
    reused = sum(score.reused for variant in results.variants.values() for score in variant.scores.values())
    were = "answer was" if reused == 1 else "answers were"
    notes = [f"{count(reused)} {were} kept from an earlier call and not scored again"] if reused else []
    kinds = [(variant.model or results.provenance).get("matmul") for variant in results.variants.values()]
    notes += [f"Matrix products: {PRODUCTS[kind]}" for kind in dict.fromkeys(kinds) if kind in PRODUCTS]
    patches = sum(variant.patch is not None for variant in results.variants.values())
    return Document(
        title=listed(list(results.variants)) if results.of_models else results.model["name"],
        kind="evaluation",
        glance=(
            ("Models", count(len(results.variants))) if results.of_models else ("Patches", count(patches)),
            ("Tasks", count(len(next(iter(results.variants.values())).scores))),
            ("Weights", str(results.model.get("dtype", "unknown"))),
        ),
        parts=(Part(_sections(results)),),
        closing=(citation_section([results]),),
        summary=(score_table_of({"": results}), *_compared(results), Sentences((*notes, *results.warnings))),
    )


def _sections(results: EvaluationResults) -> tuple[Section, ...]:
    protocol: list[Fact] = [] if results.of_models else [("Model", _model_text(results.model))]
    for label, variant in results.variants.items():
        if variant.model is not None:
            protocol.append((f"Model {label}", _model_text(variant.model)))
        if variant.patch is not None:
            protocol.append((f"Patch {label}", f"{variant.patch}, {count(variant.added)} parameters added"))
    protocol.append(("Evaluation", evaluation_text(results.settings)))
    for task, score in next(iter(results.variants.values())).scores.items():
        settings = settings_text({"version": score.version, "few-shot examples": score.num_fewshot})
        documents = f"{documents_text(score.n, score.clusters)} documents, data SHA-256 {digest(score.data_sha256)}"
        protocol.append((f"Task {task}", f"{settings}, {documents}"))
    sections = (
        Section("results", "Results", (*_compared(results), score_table_of({"": results}))),
        Section("warnings", "Warnings", (Sentences(tuple(results.warnings)),) if results.warnings else ()),
        Section("protocol", "Protocol", (Facts(tuple(protocol)),)),
        Section("environment", "Environment", (Facts(tuple(provenance_facts(results.provenance))),)),
    )
    return tuple(section for section in sections if section.blocks)


def _compared(results: EvaluationResults) -> tuple[Table, ...]:
    """Return the verdicts, and below them the differences by measures that decide nothing."""
    if not results.comparisons:
        return ()
    several = results.of_models
    columns = [Column("model"), Column("compared with")] if several else [Column("patch")]
    numbers = "difference", "corrected", "p (Holm)", "detectable"
    columns += [Column("task"), *(Column(name, number=True) for name in numbers), Column("verdict")]
    decided = {(verdict.pair, verdict.task, verdict.metric) for verdict in results.verdicts}
    others = [pair for pair in results.comparisons if (pair.pair, pair.task, pair.metric) not in decided]
    rows, differences = [], list[Verdict | Comparison]([*results.verdicts, *others])
    for pair in differences:
        verdict = pair if isinstance(pair, Verdict) else None
        plain, corrected = Change(pair.difference, pair.low, pair.high, Scale.RAW), NOTHING
        if verdict is not None and verdict.p_corrected is not None:
            corrected = interval_of(replace(plain, low=verdict.corrected_low, high=verdict.corrected_high))
        visible = verdict.detectable if verdict is not None else None
        cells: list[str | Cell] = list(pair.pair if several else [pair.method])
        cells += [
            Cell((pair.task, f"{pair.metric}, n = {documents_text(pair.n, pair.clusters)}")),
            Cell((signed_size(plain), interval_of(plain) if math.isfinite(plain.low) else "")) if pair.n else NOTHING,
            corrected,
            p_text(verdict.p_corrected) if verdict else NOTHING,
            NOTHING if visible is None else significant(visible, 2),
        ]
        why = f" ({verdict.why})" if verdict is not None and verdict.why else ""
        cells.append("no verdict" if verdict is None else Cell((f"{verdict.outcome}{why}",), verdict.tone))
        rows.append(Row(tuple(cells), faint=verdict is None))
    title = "Differences between the models" if several else "Differences from the base"
    family = max((verdict.family for verdict in results.verdicts), default=0)
    tests = "1 test" if family == 1 else f"{family} tests"
    caption = (
        f"{'Model minus the one it is compared with' if several else 'Patch minus base'} in the metric's own unit with "
        "its plain 95 % interval, paired by document. One measure decides each task, by a test corrected by Holm's "
        f"method over all {'pairs' if several else 'patches'} and tasks ({tests}); the corrected interval "
        "belongs to its verdict. Detectable: what a corrected test finds in about four of five cases."
    )
    return (Table("differences", title, tuple(columns), tuple(rows), caption),)


def evaluation_csv(sources: Mapping[str, EvaluationResults]) -> str:
    """Return every number of evaluations, by label: a row for each model, task or group, and metric.

    Of several evaluations the first column is the label.
    """
    headings = ["model", "patch", "added", "task", "metric", "value", "stderr", "n", "groups", "grouped_by"]
    headings = ["evaluation"] * (len(sources) > 1) + headings
    made = ({**record, "evaluation": label} for label, one in sources.items() for record in one.records("scores"))
    return csv_text(made, headings)


def _model_text(model: Mapping[str, Any]) -> str:
    tokenizer = f", tokenizer SHA-256 {digest(model['tokenizer_sha256'])}" if "tokenizer_sha256" in model else ""
    others = {key: value for key, value in model.items() if key not in ("name", "gguf") and "sha256" not in key}
    gguf = f", {gguf_text(model['gguf'])}" if "gguf" in model else ""
    return f"{model['name']}, {settings_text(others)}{gguf}, SHA-256 {digest(model['sha256'])}{tokenizer}"


class _Line(NamedTuple):
    """The key of a line of scores; ``data`` are hashes of documents, prompts and task."""

    task: str
    version: str
    num_fewshot: str
    metric: str
    n: int
    data: str


def score_table_of(sources: Mapping[str, EvaluationResults]) -> Table:
    """Return all scores of one evaluation or of several, by their labels, a column for each model or patch.

    Scores share a line where documents, version of the task and number of examples are the same. Of several evaluations
    the prompts must be the same too; in one they may differ, as each model has its own template.
    """
    variants, models = {}, {}
    for source, results in sources.items():
        for label, variant in results.variants.items():
            if len(sources) == 1:
                bare = len(results.variants) == 1 and variant.patch is None
                name = results.model["name"] if bare else label
            else:
                name = source if len(results.variants) == 1 else f"{source}: {label}"
            variants[name], models[name] = variant, base_identity(variant.model or results.model)
    caption = "Value and standard error over documents."
    if len(sources) > 1:
        caption += (
            " Scores share a line where they are of the same documents, the same version of the task and as many "
            "examples, asked with the same prompts; nothing was tested across evaluations."
        )
    tokens: dict[tuple[str, Any, str], list[str]] = {}
    cells: dict[str, dict[_Line, str]] = {}
    for label, variant in variants.items():
        data_of = {}
        for task, score in variant.scores.items():
            data_of[task] = score.data_sha256
            if len(sources) > 1:  # the prompts and the code of a task count too, and other tokens of one tokenizer
                tokenizer = models[label]["tokenizer"] or models[label]["base_weights"]
                cuts = tokens.setdefault((task, tokenizer, score.prompts_sha256), [])
                cuts += [score.tokens_sha256] * (score.tokens_sha256 not in cuts)
                data_of[task] += f" {score.prompts_sha256} {score.task_sha256} {cuts.index(score.tokens_sha256)}"
        cells[label] = {}
        for result in variant.rows:
            if isinstance(result, TaskResult):
                name, examples, data = result.task, str(result.num_fewshot), data_of[result.task]
            else:
                name, examples, data = result.group, "", " ".join(data_of.values())
            for metric, value in result.metrics.items():
                error, shown = result.stderr.get(metric), value_text(value)
                line = _Line(name, result.version, examples, metric, result.n, data)
                cells[label][line] = shown if error is None else f"{shown} ± {value_text(error)}"
    shown_lines = dict.fromkeys(line for column in cells.values() for line in column)
    tasks = list(dict.fromkeys(line.task for line in shown_lines))  # the lines of one task are put together
    groups = {group for variant in variants.values() for group in variant.groups or ()}
    rows = [
        Row(
            (*line[:4], count(line.n), *(cells[label].get(line, NOTHING) for label in variants)),
            strong=line.task in groups,
        )
        for line in sorted(shown_lines, key=lambda line: tasks.index(line.task))
    ]
    columns = [Column(name, number=name in ("n-shot", "n")) for name in ("task", "version", "n-shot", "metric", "n")]
    columns += [Column(label, number=True) for label in variants]
    return Table("scores", "Scores", tuple(columns), tuple(rows), caption)


def value_text(value: float) -> str:
    """Format a score, or its standard error: with four decimals, of tiny and huge ones with two or four digits."""
    if 0 < abs(value) < 5e-4:
        return significant(value, 2)
    return decimal(value, 4) if abs(value) < 1e6 else significant(value, 4)


def joint_evaluation_document(sources: Mapping[str, EvaluationResults]) -> Document:
    """Return the scores of several evaluations by label in one table, their differences in method, and parts."""
    table, differing = score_table_of(sources), tuple(measured_differently(sources))
    variants = [variant for evaluation in sources.values() for variant in evaluation.variants.values()]
    opening = [Section("results", "Scores", (table,))]
    if differing:
        opening.append(Section("differing", "What differs between the evaluations", (Sentences(differing),)))
    return Document(
        title=listed(list(sources)),
        kind="evaluation",
        glance=(
            ("Evaluations", count(len(sources))),
            ("Models and patches", count(len(variants))),
            ("Tasks", count(len({task for one in variants for task in one.scores}))),
        ),
        opening=tuple(opening),
        parts=tuple(
            Part(_sections(results), title, f"run{index + 1}-")
            for index, (title, results) in enumerate(sources.items())
        ),
        closing=(citation_section(sources.values()),),
        summary=(table, Sentences(differing)),
    )
