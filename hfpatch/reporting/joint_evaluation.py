"""One report of several evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hfpatch.reporting.citations import citation_section
from hfpatch.reporting.document import Document, Part, Section, Sentences
from hfpatch.reporting.evaluation import evaluation_sections
from hfpatch.reporting.facts import settings_text
from hfpatch.reporting.numbers import count, listed
from hfpatch.reporting.score_tables import score_table_of
from hfpatch.results.schema import EvaluationResults

_FREE = {"tasks", "batch_size", "token_budget", "allow_unknown_base"}
"""Settings in which evaluations may differ without any effect on a score that they share."""


def joint_evaluation_document(sources: Mapping[str, EvaluationResults]) -> Document:
    """Return the scores of several evaluations in one table, what differs in how they were made, and each by itself."""
    table, differing = score_table_of(sources), tuple(_differing(sources))
    opening = [Section("scores", "Scores", (table,))]
    if differing:
        opening.append(Section("differing", "What differs between the evaluations", (Sentences(differing),)))
    return Document(
        title=listed(list(sources)),
        kind="evaluation",
        glance=(
            ("Evaluations", count(len(sources))),
            ("Models and patches", count(sum(len(each.variants) for each in sources.values()))),
            ("Tasks", count(len({name for each in sources.values() for name in _tasks(each)}))),
        ),
        opening=tuple(opening),
        parts=tuple(
            Part(evaluation_sections(results), title, f"run{place + 1}-")
            for place, (title, results) in enumerate(sources.items())
        ),
        closing=(citation_section(sources.values()),),
        summary=(table, Sentences(differing)),
    )


def _tasks(results: EvaluationResults) -> Iterator[str]:
    for variant in results.variants.values():
        yield from variant.scores


def _differing(sources: Mapping[str, EvaluationResults]) -> Iterator[str]:
    """Yield what is not the same in all evaluations: models, settings that change scores, and documents."""
    settings = {title: {k: v for k, v in each.settings.items() if k not in _FREE} for title, each in sources.items()}
    for key in dict.fromkeys(key for each in settings.values() for key in each):
        values = {title: each.get(key) for title, each in settings.items()}
        if len(set(map(repr, values.values()))) > 1:
            shown = (f"{title} {settings_text({key: value}) or f'{key} not set'}" for title, value in values.items())
            yield f"Settings differ: {', '.join(shown)}."
    models: dict[tuple[Any, ...], list[str]] = {}
    for title, each in sources.items():
        models.setdefault((each.model.get("name"), each.model.get("sha256"), each.model.get("dtype")), []).append(title)
    if len(models) > 1:
        named = (f"{listed(titles)} {model[0]} in {model[2]}" for model, titles in models.items())
        yield f"The models differ: {'; '.join(named)}."
    documents: dict[str, set[str]] = {}
    for each in sources.values():
        for variant in each.variants.values():
            for task, score in variant.scores.items():
                documents.setdefault(task, set()).add(score.data_sha256)
    for task, hashes in documents.items():
        if len(hashes) > 1:
            yield f"{task} was scored on {len(hashes)} different sets of documents, which have lines of their own."
