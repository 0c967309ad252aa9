"""What a reader of a study must know before believing a number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hfpatch.reporting.numbers import count, diverged_text, listed
from hfpatch.reporting.study.answer import share
from hfpatch.reporting.study.results import Row, StudyResults
from hfpatch.reporting.study.words import (
    FEW_SEEDS,
    key_text,
    point_text,
    seeds_text,
    share_words,
    value_text,
)

_MATCHED = 0.01  # variants whose parameters differ by more than this share are named


def cautions(study: StudyResults) -> list[str]:
    """Return one sentence for each thing that weakens what the study shows."""
    found = (_seeds(study), _sizes(study), _points(study), _edges(study), _divergence(study), _training(study))
    return [sentence for sentences in found for sentence in sentences]


def _seeds(study: StudyResults) -> Iterator[str]:
    seeds = len(study.seeds)
    if seeds == 1:
        yield "One seed: differences have no interval, and none is told as one."
    elif seeds < FEW_SEEDS:
        yield (
            f"{seeds_text(seeds)}: Student's t with {seeds - 1} degree{'s' * (seeds != 2)} of freedom gives wide "
            "intervals, so small differences cannot be told from noise."
        )


def _sizes(study: StudyResults) -> Iterator[str]:
    for name in study.others:
        if abs(share(study, name)) > _MATCHED:
            own = count(study.variants[name].parameters.non_embedding)
            words = share_words(share(study, name)).removeprefix("with ")
            yield f"{name} has {words} than {study.baseline} (non-embedding {own}): not matched."


def _points(study: StudyResults) -> Iterator[str]:
    if not study.sweep:
        return
    yield (
        "The point of each variant is chosen on the evaluation text that its loss is told on, so the best of many "
        "points is favoured; the seeds' interval does not hold that choice."
    )
    tried = {name: sum(row.variant == name for row in study.rows) for name in study.variants}
    if len(set(tried.values())) > 1:
        yield f"Not all variants have as many points: {', '.join(f'{name} {n}' for name, n in tried.items())}."


def _edges(study: StudyResults) -> Iterator[str]:
    """Name best points at the edge of the sweep, behind which a better one may lie."""
    for name, row in study.chosen.items():
        if not row.best:
            continue
        at = [
            f"{key_text(key)} {value_text(row.point[key])} ({edge} of those tried)"
            for key, values in study.sweep.items()
            if key in row.point and (edge := _edge(values, row.point[key]))
        ]
        if at:
            yield f"{name}: the best point lies at the edge of the sweep, {listed(at)}; a better one may lie beyond."


def _edge(values: list[Any], value: Any) -> str:
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values) or len(set(values)) < 2:
        return ""
    return "the largest" if value == max(values) else "the smallest" if value == min(values) else ""


def _divergence(study: StudyResults) -> Iterator[str]:
    for name, row in study.chosen.items():
        rows = [each for each in study.rows if each.variant == name]
        if len(rows) > 1 and all(each.diverged for each in rows):
            yield f"{name}: a seed diverged at every point, so none is the best."
        if row.diverged:
            kept = (
                "its numbers are of the other seeds, which flatters it"
                if row.loss is not None
                else "it has no loss to compare"
            )
            yield f"{_named(row)} {diverged_text(row.diverged)}; {kept}."


def _named(row: Row) -> str:
    return f"{row.variant} ({point_text(row.point)})" if row.point else row.variant


def _training(study: StudyResults) -> Iterator[str]:
    for name, variant in study.variants.items():
        if name != study.baseline and variant.training:
            base = study.variants[study.baseline].training
            other = [key for key, value in variant.training.items() if base.get(key) != value]
            if other:
                settings = ", ".join(f"{key} {value_text(variant.training[key])}" for key in other)
                yield f"{name} is trained with settings of its own: {settings}."
