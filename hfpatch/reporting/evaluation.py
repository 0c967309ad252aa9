"""The report of ``hfpatch eval``: the scores of each model, and the patches compared with the base."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hfpatch.reporting.citations import citation_section
from hfpatch.reporting.document import Cell, Column, Document, Fact, Facts, Part, Row, Section, Sentences, Table
from hfpatch.reporting.facts import digest, evaluation_text, gguf_text, provenance_facts, settings_text
from hfpatch.reporting.numbers import (
    NOTHING,
    count,
    documents_text,
    interval,
    listed,
    p_text,
    signed,
    significant,
)
from hfpatch.reporting.score_tables import value_text
from hfpatch.reporting.tabular import csv_text
from hfpatch.results.cautions import PRODUCTS
from hfpatch.results.schema import Comparison, EvaluatedVariant, EvaluationResults, Verdict


def evaluation_document(results: EvaluationResults) -> Document:
    """Return the scores of every model, the differences between them, the warnings and how it was measured."""
    scores, compared = _score_tables(results), _compared(results)
    reused = sum(score.reused for variant in results.variants.values() for score in variant.scores.values())
    notes = [f"{count(reused)} answers were kept from an earlier call and not scored again"] if reused else []
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
        parts=(Part(evaluation_sections(results)),),
        closing=(citation_section([results]),),
        summary=(*scores, *compared, Sentences((*notes, *results.warnings))),
    )


def evaluation_sections(results: EvaluationResults) -> tuple[Section, ...]:
    """Return the sections of one evaluation, without those that would be empty."""
    sections = (
        Section("results", "Results", (*_compared(results), *_score_tables(results))),
        Section("warnings", "Warnings", (Sentences(tuple(results.warnings)),) if results.warnings else ()),
        Section("protocol", "Protocol", (Facts(tuple(_protocol(results))),)),
        Section("environment", "Environment", (Facts(tuple(provenance_facts(results.provenance))),)),
    )
    return tuple(section for section in sections if section.blocks)


def _score_tables(results: EvaluationResults) -> tuple[Table, ...]:
    return tuple(_scores(results, place, each) for place, each in enumerate(results.variants.values()))


def _compared(results: EvaluationResults) -> tuple[Table, ...]:
    """Return the verdicts, and below them the differences by measures that decide nothing."""
    if not results.comparisons:
        return ()
    several = results.of_models
    headings = {
        **({"model": False, "compared with": False} if several else {"patch": False}),
        **{"task": False, "difference": True, "simultaneous": True, "p (Holm)": True, "detectable": True},
        "verdict": False,
    }
    decided = {(each.method, each.other, each.task, each.metric) for each in results.verdicts}
    others = [
        each for each in results.comparisons if (each.method, each.reference, each.task, each.metric) not in decided
    ]
    rows = [_difference(each, each.other, several=several) for each in results.verdicts]
    rows += [_difference(each, each.reference, several=several) for each in others]
    title = "Differences between the models" if several else "Differences from the base"
    family = max((each.family for each in results.verdicts), default=0)
    caption = (
        f"{'Model minus the one it is compared with' if several else 'Patch minus base'} in the metric's own unit with "
        "its plain 95 % interval, paired by document. One measure decides each task, by a test corrected by Holm's "
        f"method over all {'pairs' if several else 'patches'} and tasks ({family} tests); the simultaneous interval "
        "belongs to its verdict. Detectable: what a corrected test finds in about four of five cases."
    )
    columns = tuple(Column(heading, number=number) for heading, number in headings.items())
    return (Table("differences", title, columns, tuple(rows), caption),)


def _difference(found: Verdict | Comparison, other: str, *, several: bool) -> Row:
    verdict = found if isinstance(found, Verdict) else None
    tested = verdict is not None and verdict.p_corrected is not None
    visible = verdict.smallest_visible if verdict is not None else None
    cells: list[str | Cell] = [found.method, *([other] if several else [])]
    cells += [
        Cell((found.task, f"{found.metric}, n = {documents_text(found.n, found.clusters)}")),
        Cell((signed(found.difference, 4), interval(found.low, found.high, 4) if math.isfinite(found.low) else "")),
        interval(verdict.simultaneous_low, verdict.simultaneous_high, 4) if verdict and tested else NOTHING,
        p_text(verdict.p_corrected) if verdict else NOTHING,
        NOTHING if visible is None else significant(visible, 2),
    ]
    if verdict is None:
        return Row((*cells, "no verdict"), faint=True)
    words = f"{verdict.verdict} ({verdict.why})" if verdict.why else verdict.verdict
    return Row((*cells, Cell((words,), verdict.verdict)))


def evaluation_csv(sources: Mapping[str, EvaluationResults]) -> str:
    """Return every number of evaluations, by what each is called: a row for each model, task or group, and metric.

    Of several evaluations the first column names the one that a row is of.
    """
    headings = ("model", "patch", "added", "task", "metric", "value", "stderr", "n", "groups", "grouped_by")
    if len(sources) == 1:
        return csv_text(headings, _numbers(next(iter(sources.values()))))
    rows = ((source, *row) for source, results in sources.items() for row in _numbers(results))
    return csv_text(("evaluation", *headings), rows)


def _numbers(results: EvaluationResults) -> Iterator[tuple[Any, ...]]:
    for label, variant in results.variants.items():
        start = label, variant.patch, variant.added
        for name, group in (variant.groups or {}).items():
            for metric, value in group.metrics.items():
                yield *start, name, metric, value, group.stderr.get(metric), group.n, None, None
        for name, score in variant.scores.items():
            known = score.clusters
            groups = (None, None) if known is None else (known.groups, known.column)
            for metric, value in score.metrics.items():
                yield *start, name, metric, value, score.stderr.get(metric), score.n, *groups


def _protocol(results: EvaluationResults) -> Iterator[Fact]:
    if not results.of_models:
        yield "Model", _model_text(results.model)
    for label, variant in results.variants.items():
        if variant.model is not None:
            yield f"Model {label}", _model_text(variant.model)
        if variant.patch is not None:
            yield f"Patch {label}", f"{variant.patch}, {count(variant.added)} parameters added"
    yield "Evaluation", evaluation_text(results.settings)
    for task, score in next(iter(results.variants.values())).scores.items():
        settings = settings_text({"version": score.version, "few-shot examples": score.num_fewshot})
        yield f"Task {task}", f"{settings}, data SHA-256 {digest(score.data_sha256)}"


def _model_text(model: Mapping[str, Any]) -> str:
    tokenizer = f", tokenizer SHA-256 {digest(model['tokenizer_sha256'])}" if "tokenizer_sha256" in model else ""
    others = {key: value for key, value in model.items() if key not in ("name", "gguf") and "sha256" not in key}
    gguf = f", {gguf_text(model['gguf'])}" if "gguf" in model else ""
    return f"{model['name']}, {settings_text(others)}{gguf}, SHA-256 {digest(model['sha256'])}{tokenizer}"


def _scores(results: EvaluationResults, place: int, variant: EvaluatedVariant) -> Table:
    """Return every metric of every group and task as lm-eval defines it."""
    headings = {"task": False, "metric": False, "value": True, "± standard error": True, "n": True}
    rows = [
        (name, metric, _value(value), _value(group.stderr.get(metric)), count(group.n))
        for name, group in (variant.groups or {}).items()
        for metric, value in group.metrics.items()
    ]
    rows += [
        (task, metric, _value(value), _value(score.stderr.get(metric)), documents_text(score.n, score.clusters))
        for task, score in variant.scores.items()
        for metric, value in score.metrics.items()
    ]
    name = (variant.model or results.model)["name"]
    title = f"{name} with {variant.patch}" if variant.patch else name
    columns = tuple(Column(heading, number=number) for heading, number in headings.items())
    return Table(f"scores-{place}", title, columns, tuple(map(Row, rows)))


def _value(value: float | None) -> str:
    return NOTHING if value is None else value_text(value)
