"""One report of several evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from hfpatch.reporting.citations import citation_section
from hfpatch.reporting.document import Document, Part, Section, Sentences
from hfpatch.reporting.evaluation import evaluation_sections
from hfpatch.reporting.facts import settings_text
from hfpatch.reporting.numbers import count, listed
from hfpatch.reporting.score_tables import score_table_of
from hfpatch.results.identity import (
    FREE_SETTINGS,
    OF_BASE,
    OF_TASK,
    base_identity,
    computed_differently,
    task_identity,
)
from hfpatch.results.records import read_values
from hfpatch.results.schema import EvaluationResults


def joint_evaluation_document(
    sources: Mapping[str, EvaluationResults], folders: Mapping[str, Path] | None = None
) -> Document:
    """Return the scores of several evaluations in one table, what differs in how they were made, and each by itself.

    Args:
        sources: the evaluations, by what they are called.
        folders: where their records are, by which decisions on the same documents are compared.
    """
    table, differing = score_table_of(sources), (*_differing(sources), *_decisions(sources, folders or {}))
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
    yield from settings_differing({title: each.settings for title, each in sources.items()})
    models: dict[tuple[Any, ...], list[str]] = {}
    for title, each in sources.items():
        models.setdefault((each.model.get("name"), each.model.get("sha256"), each.model.get("dtype")), []).append(title)
    if len(models) > 1:
        named = (f"{listed(titles)} {model[0]} in {model[2]}" for model, titles in models.items())
        yield f"The models differ: {'; '.join(named)}."
    yield from _bases_differing(sources)
    yield from _tasks_differing(sources)
    computed = {title: each.provenance.get("computed_with") for title, each in sources.items()}
    yield from computed_differently({title: values for title, values in computed.items() if isinstance(values, dict)})


def settings_differing(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the settings that change scores and are not the same in all evaluations, by what these are called."""
    kept = {title: {k: v for k, v in each.items() if k not in FREE_SETTINGS} for title, each in settings.items()}
    for key in dict.fromkeys(key for each in kept.values() for key in each):
        values = {title: each.get(key) for title, each in kept.items()}
        if len(set(map(repr, values.values()))) > 1:
            shown = (f"{title} {settings_text({key: value}) or f'{key} not set'}" for title, value in values.items())
            yield f"Settings differ: {', '.join(shown)}."


def _decisions(sources: Mapping[str, EvaluationResults], folders: Mapping[str, Path]) -> Iterator[str]:
    """Yield how many documents are decided otherwise, of models of one name that were computed in other numbers."""
    for first, second in combinations([title for title in sources if title in folders], 2):
        one, other = sources[first], sources[second]
        if one.model.get("name") != other.model.get("name") or _numbers_of(one) == _numbers_of(other):
            continue
        for label in (label for label in one.variants if label in other.variants):
            scores, values = (
                one.variants[label].scores,
                [read_values(folders[each] / label) for each in (first, second)],
            )
            for task, score in scores.items():
                pair = [each[task] for each in values if task in each and score.primary in each[task].metrics]
                if len(pair) < 2 or pair[0].documents != pair[1].documents:
                    continue
                changed = pair[0].metrics[score.primary] != pair[1].metrics[score.primary]
                decided = len(set(np.concatenate([each.metrics[score.primary].ravel() for each in pair]))) <= 2
                if decided:  # right or wrong
                    yield (
                        f"{task}, {label}: {count(int(changed.sum()))} of {count(len(changed))} documents are decided "
                        f"otherwise ({score.primary}) in {second} ({_numbers_of(other)}) than in {first} "
                        f"({_numbers_of(one)})."
                    )


def _numbers_of(results: EvaluationResults) -> str:
    """Return in what numbers a model was computed: its dtype, and that of the products where it is another one."""
    products = results.provenance.get("matmul") == "fp32"
    return f"{results.model.get('dtype')}{' with products in float32' if products else ''}"


def _bases_differing(sources: Mapping[str, EvaluationResults]) -> Iterator[str]:
    """Yield in what else models of the same weights differ."""
    by_weights: dict[Any, dict[str, dict[str, Any]]] = {}
    for title, each in sources.items():
        for label, variant in each.variants.items():
            model = variant.model or each.model
            name = title if variant.model is None else f"{title}: {label}"
            by_weights.setdefault(model.get("sha256"), {})[name] = base_identity(model)
    for known in by_weights.values():
        for key, what in {**OF_BASE, "loading": "way of loading"}.items():
            values = {name: each.get(key) for name, each in known.items()}
            if len(set(map(repr, values.values()))) > 1:
                how = "not recorded in all of them" if None in values.values() else "not the same"
                yield f"The {what} of {listed(list(values))} is {how}; their weights are the same."


def _tasks_differing(sources: Mapping[str, EvaluationResults]) -> Iterator[str]:
    """Yield the tasks that are not the same in all evaluations."""
    found: dict[tuple[str, str], set[str | None]] = {}
    for each in sources.values():
        for variant in each.variants.values():
            for task, score in variant.scores.items():
                for name, value in task_identity(score).items():
                    found.setdefault((task, name), set()).add(value)
    for (task, name), hashes in found.items():
        if len(hashes) == 1 or name == "tokens_sha256":  # other models have other tokens
            continue
        if name == "data_sha256":
            yield f"{task} was scored on {len(hashes)} different sets of documents, which have lines of their own."
        else:
            how = "are not recorded in all of them" if None in hashes else f"are {len(hashes)} different ones"
            yield f"{task}: its {OF_TASK[name]} {how}, which have lines of their own."
