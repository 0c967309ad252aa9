"""The sentences of a study's report: its answer, its cautions, and what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hfpatch.errors import listed
from hfpatch.reporting.document import Finding
from hfpatch.reporting.numbers import (
    NOTHING,
    Change,
    Scale,
    change_text,
    count,
    decimal,
    diverged_text,
    p_text,
    signed,
    size_text,
)
from hfpatch.results.comparison import MATCHED
from hfpatch.results.schema import Improvement, StudyResults

_HEADLINE = {
    "better": "better",
    "worse": "worse",
    "not decided": "not decided",
    "lower": "lower in loss, untested",
    "higher": "higher in loss, untested",
    "not tested": "not compared",
}
FEW_SEEDS = 5  # with fewer seeds the report says that they are few
_SAME_SIZE = 5e-5  # a smaller relative difference in parameters is reported as none


def key_text(key: str) -> str:
    """Return a sweep's key as a heading: ``training.lr`` is ``lr``."""
    return key.removeprefix("training.")


def value_text(value: Any) -> str:
    """Return a setting's value as a recipe would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def point_text(point: Mapping[str, Any]) -> str:
    """Return a point of the sweep as ``lr 0.002, weight_decay 0.1``."""
    return ", ".join(f"{key_text(key)} {value_text(value)}" for key, value in point.items())


def uneven_text(study: StudyResults) -> str:
    """Say that variants were tried at different numbers of points; nothing where they were not."""
    counts = study.tried_counts
    if len(set(counts.values())) < 2:
        return ""
    named = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"Not all variants have as many points ({named}): a difference may come from tuning one of them more."


def not_run_text(seeds: Sequence[int]) -> str:
    """Return ``seed 2 has not run yet`` or ``seeds 1 and 2 have not run yet``."""
    named = listed([str(seed) for seed in seeds])
    return f"seed {named} has not run yet" if len(seeds) == 1 else f"seeds {named} have not run yet"


def share_words(share: float) -> str:
    """Return a relative difference in parameters for a sentence: ``12.50 % more parameters``."""
    if abs(share) < _SAME_SIZE:
        return "as many parameters"
    return f"{abs(100 * share):.2f} % {'more' if share > 0 else 'fewer'} parameters"


def change_of(study: StudyResults, name: str) -> Change:
    """Return a variant's improvement in per cent of the baseline's loss, with the interval of its verdict.

    Where nothing was tested the interval is the plain one; its ends are infinite where there is none.
    """
    found = study.verdict(name)
    low, high = found.low, found.high
    if found.p_corrected is not None:
        low, high = found.corrected_low, found.corrected_high
    return Change(100 * found.difference, 100 * low, 100 * high, Scale.RELATIVE)


def improvement_text(improvement: Improvement | None) -> str:
    """Return ``+1.20 [1.00, 1.40]``, in per cent; without an interval the mean alone, without either a dash."""
    if improvement is None:
        return NOTHING
    if improvement.low is None or improvement.high is None:
        return signed(100 * improvement.mean, 2)
    ends = 100 * improvement.low, 100 * improvement.high
    return change_text(Change(100 * improvement.mean, *ends, Scale.RELATIVE), unit=False)


def share(study: StudyResults, variant: str) -> float:
    """Return by which share a variant has more non-embedding parameters than the baseline."""
    here, base = study.variants[variant].parameters, study.variants[study.baseline].parameters
    return here.non_embedding / base.non_embedding - 1


def headline(study: StudyResults) -> str:
    """Say how many variants are better and worse than the baseline, each at its best point, and by how much."""
    if not study.others:
        return f"There is no variant to compare with {study.baseline}."
    named: dict[str, list[str]] = {verdict: [] for verdict in _HEADLINE}
    for name in study.others:
        row, text = study.chosen.get(name), name
        verdict: str = study.verdict(name).outcome
        if row is not None and row.improvement is not None and verdict != "not decided":
            direction = "lower" if row.improvement.mean > 0 else "higher"
            verdict = direction if verdict == "not tested" else verdict
            text = f"{name}: {_size(study, name)} {direction} loss with {share_words(share(study, name))}"
        named[verdict].append(text)
    parts = [
        f"{len(names)} {'is' if len(names) == 1 else 'are'} {_HEADLINE[verdict]} ({listed(names)})"
        for verdict, names in named.items()
        if names
    ]
    variants = "1 variant" if len(study.others) == 1 else f"{len(study.others)} variants"
    sentences = [f"Of {variants} against {study.baseline}, by the validation loss: {listed(parts)}."]
    if len(study.seeds) == 1:
        sentences.append("One seed does not show how much seeds differ, so no variant is called better or worse.")
    elif len(study.seeds) < FEW_SEEDS:
        few = f"{len(study.seeds)} seeds are few"
        sentences.append(f"{few}: a variant that is not decided may differ.")
    if max(study.tried_counts.values(), default=0) > 1:
        sentences.append("Each is at the best of its points, which was chosen on the evaluation text itself.")
        sentences += filter(None, [uneven_text(study)])
    if not study.complete:
        sentences.append("The study is not complete.")
    return " ".join(sentences)


def findings(study: StudyResults) -> tuple[Finding, ...]:
    """Return a sentence for each variant: its difference to the baseline, the test, and missing or diverged seeds."""
    made, base = [], study.chosen.get(study.baseline)
    for name in study.others:
        row, found, parameters = study.chosen.get(name), study.verdict(name), share_words(share(study, name))
        if row is None or row.improvement is None or row.loss is None:
            reasons = [] if row is not None else ["no run of it is finished"]
            if row is not None and not study.seed_values(row):
                reasons += [f"it {diverged_text(row.diverged)}"] if row.diverged else []
                reasons += [not_run_text(row.missing)] if row.missing else []
            if not reasons and (base is None or not base.best):
                reasons = [f"{study.baseline} has no best point to compare it with yet"]
            why = f": {'; '.join(reasons)}" if reasons else ""
            made.append(Finding(name, f"was not compared{why}; it has {parameters}.", found.tone))
            continue
        improvement = row.improvement
        base_loss = decimal(base.loss.mean, 4) if base is not None and base.loss is not None else NOTHING
        losses = f"({decimal(row.loss.mean, 4)} against {base_loss} nats per token) with {parameters}"
        tested = f"(p = {p_text(found.p)}, after Holm's correction over {found.family} {p_text(found.p_corrected)})"
        if found.outcome == "not tested":
            size = f"{_size(study, name)} {'lower' if improvement.mean > 0 else 'higher'}"
            clauses = [f"has a validation loss {size} {losses}; not tested ({found.why})"]
        elif found.outcome == "not decided":
            clauses = [f"not decided: {change_text(change_of(study, name))} improvement {losses} {tested}"]
        else:
            verb = "lowers" if found.outcome == "better" else "raises"
            clauses = [f"{verb} the validation loss by {_size(study, name)} {losses} {tested}"]
        if improvement.choices > 1:
            fold = f"{improvement.choices}-fold"
            clauses.append(f"interval and p are corrected {fold}, as one of the two was chosen from more points")
        clauses += [f"it {diverged_text(row.diverged)}"] if row.diverged else []
        clauses += [not_run_text(row.missing)] if row.missing else []
        made.append(Finding(name, "; ".join(clauses) + ".", found.tone))
    return tuple(made)


def _size(study: StudyResults, name: str) -> str:
    """Return an improvement without its sign, which the direction says."""
    change = change_of(study, name)
    return size_text(change) if math.isfinite(change.low) else f"{decimal(abs(change.difference), 2)} %"


def cautions(study: StudyResults) -> list[str]:
    """Return a sentence for each weakness of the study."""
    found, seeds = [], len(study.seeds)
    if seeds == 1:
        found.append("One seed: differences have no interval, and none is tested.")
    elif seeds < FEW_SEEDS:
        found.append(
            f"{seeds} seeds: Student's t with {seeds - 1} degree{'s' * (seeds != 2)} of freedom gives wide "
            "intervals, so small differences may not be detected."
        )
    for name in study.others:
        if abs(share(study, name)) > MATCHED:
            own, words = count(study.variants[name].parameters.non_embedding), share_words(share(study, name))
            found.append(f"{name} has {words} than {study.baseline} (non-embedding {own}): not matched.")
    if max(study.tried_counts.values(), default=0) > 1:
        found.append(
            "The point of each variant is chosen on the evaluation text on which its loss is reported, so the best of "
            "many points looks better than it is; interval and p are corrected where a variant had more points than "
            "the baseline, or fewer."
        )
        found += filter(None, [uneven_text(study)])
        for name, row in study.chosen.items():
            edges = []  # values of a best point that are the smallest or the largest that its variant was tried at
            for key, value in row.point.items() if row.best else ():
                tried = [point[key] for point in study.tried(name) if key in point]
                numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in tried)
                if numbers and len(set(tried)) > 1 and value in (min(tried), max(tried)):
                    edge = "largest" if value == max(tried) else "smallest"
                    edges.append(f"{key_text(key)} {value_text(value)} (the {edge} of those tried)")
            if edges:
                at = listed(edges)
                found.append(
                    f"{name}: the best point is at the edge of the sweep, {at}; a better one may be beyond it."
                )
    for name, row in study.chosen.items():
        rows = [each for each in study.rows if each.variant == name]
        if len(rows) > 1 and all(each.diverged for each in rows):
            found.append(f"{name}: a seed diverged at every point, so none is the best.")
        if row.diverged:
            favoured = "its numbers are those of the other seeds, which favours it"
            then = "it has no loss to compare" if row.loss is None else favoured
            where = f"{name} ({point_text(row.point)})" if row.point else name
            found.append(f"{where} {diverged_text(row.diverged)}; {then}.")
    base = study.variants[study.baseline].training
    for name in study.others:
        training = study.variants[name].training
        if other := {key: value for key, value in training.items() if base.get(key) != value}:
            settings = ", ".join(f"{key} {value_text(value)}" for key, value in other.items())
            found.append(f"{name} is trained with settings of its own: {settings}.")
    return found


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
