"""What a reader of a study must know before believing a number, and what is missing in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hfpatch.reporting.numbers import count, diverged_text, listed
from hfpatch.reporting.study.answer import share
from hfpatch.reporting.study.words import (
    FEW_SEEDS,
    key_text,
    not_run_text,
    point_text,
    seeds_text,
    share_words,
    uneven_text,
    value_text,
)
from hfpatch.results.comparison import MATCHED
from hfpatch.results.schema import StudyResults


def cautions(study: StudyResults) -> list[str]:
    """Return one sentence for each thing that weakens what the study shows."""
    return [sentence for found in (_seeds, _sizes, _sweep, _divergence, _training) for sentence in found(study)]


def missing(study: StudyResults) -> list[str]:
    """Return one sentence for each thing that a complete study would have and this one does not."""
    found = []
    if not study.complete:
        found.append("The study is not complete: run the same hfpatch pretrain with --resume to finish it.")
    for name in study.variants:
        rows = [row for row in study.rows if row.variant == name]
        if not rows:
            found.append(f"{name}: no run is finished.")
        for row in rows:
            where = f"{name}, {point_text(row.point)}" if row.point else name
            if row.missing:
                found.append(f"{where}: {not_run_text(row.missing)}.")
            elif row.loss is None and not row.diverged:
                found.append(f"{where}: no validation loss.")
    measured, ran = {run.variant for run in study.runs if run.diagnostics}, {run.variant for run in study.runs}
    for name, variant in study.variants.items():
        query = variant.architecture.get("query")
        if isinstance(query, Mapping) and query.get("path") == "nonlinear" and name in ran - measured:
            found.append(f"{name}: no diagnostics of f.")
    return found


def _seeds(study: StudyResults) -> Iterator[str]:
    seeds = len(study.seeds)
    if seeds == 1:
        yield "One seed: differences have no interval, and none is tested."
    elif seeds < FEW_SEEDS:
        yield (
            f"{seeds_text(seeds)}: Student's t with {seeds - 1} degree{'s' * (seeds != 2)} of freedom gives wide "
            "intervals, so small differences may not be detected."
        )


def _sizes(study: StudyResults) -> Iterator[str]:
    for name in study.others:
        if abs(share(study, name)) > MATCHED:
            own, words = count(study.variants[name].parameters.non_embedding), share_words(share(study, name))
            yield f"{name} has {words} than {study.baseline} (non-embedding {own}): not matched."


def _sweep(study: StudyResults) -> Iterator[str]:
    """Say how points were chosen, and which best points are at the edge of what a variant was tried at."""
    counts = study.tried_counts
    if max(counts.values(), default=0) < 2:
        return
    yield (
        "The point of each variant is chosen on the evaluation text on which its loss is reported, so the best of many "
        "points looks better than it is; interval and p are corrected where a variant had more points than the "
        "baseline, or fewer."
    )
    if uneven := uneven_text(study):
        yield uneven
    for name, row in study.chosen.items():
        at = [
            f"{key_text(key)} {value_text(value)} ({edge} of those tried)"
            for key, value in (row.point.items() if row.best else ())
            if (edge := _edge([point[key] for point in study.tried(name) if key in point], value))
        ]
        if at:
            yield f"{name}: the best point is at the edge of the sweep, {listed(at)}; a better one may be beyond it."


def _edge(values: Sequence[Any], value: Any) -> str:
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values) or len(set(values)) < 2:
        return ""
    return "the largest" if value == max(values) else "the smallest" if value == min(values) else ""


def _divergence(study: StudyResults) -> Iterator[str]:
    for name, row in study.chosen.items():
        rows = [each for each in study.rows if each.variant == name]
        if len(rows) > 1 and all(each.diverged for each in rows):
            yield f"{name}: a seed diverged at every point, so none is the best."
        if row.diverged:
            favoured = "its numbers are those of the other seeds, which favours it"
            then = "it has no loss to compare" if row.loss is None else favoured
            where = f"{name} ({point_text(row.point)})" if row.point else name
            yield f"{where} {diverged_text(row.diverged)}; {then}."


def _training(study: StudyResults) -> Iterator[str]:
    base = study.variants[study.baseline].training
    for name in study.others:
        own = study.variants[name].training
        if other := {key: value for key, value in own.items() if base.get(key) != value}:
            settings = ", ".join(f"{key} {value_text(value)}" for key, value in other.items())
            yield f"{name} is trained with settings of its own: {settings}."
