"""What a study shows: the verdict on each variant, and the sentences that its report begins with."""

from __future__ import annotations

import math

from hfpatch.reporting.document import Finding
from hfpatch.reporting.numbers import (
    NOTHING,
    Change,
    Scale,
    change_text,
    decimal,
    diverged_text,
    listed,
    p_text,
    signed,
    size_text,
)
from hfpatch.reporting.study.words import FEW_SEEDS, not_run_text, seeds_text, share_words, uneven_text
from hfpatch.results.schema import Improvement, Row, StudyResults

_HEADLINE = {
    "better": "better",
    "worse": "worse",
    "no difference shown": "without a difference shown",
    "lower": "lower in loss, untested",
    "higher": "higher in loss, untested",
    "not tested": "not compared",
}


def change_of(study: StudyResults, name: str) -> Change:
    """Return a variant's improvement in per cent of the baseline's loss, with the interval of its verdict.

    Where nothing was tested the interval is the plain one; its ends are infinite where there is none.
    """
    found = study.verdict(name)
    ends = (
        (found.simultaneous_low, found.simultaneous_high) if found.p_corrected is not None else (found.low, found.high)
    )
    return Change(100 * found.difference, 100 * ends[0], 100 * ends[1], None, Scale.RELATIVE)


def _plain(improvement: Improvement) -> Change:
    low, high = (math.nan if end is None else 100 * end for end in (improvement.low, improvement.high))
    return Change(100 * improvement.mean, low, high, None, Scale.RELATIVE)


def improvement_text(improvement: Improvement | None) -> str:
    """Return ``+1.20 [1.00, 1.40]``, in per cent; without an interval the mean alone, without either a dash."""
    if improvement is None:
        return NOTHING
    change = _plain(improvement)
    return change_text(change, unit=False) if improvement.low is not None else signed(change.difference, 2)


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
        verdict: str = study.verdict(name).verdict
        if row is not None and row.improvement is not None and verdict != "no difference shown":
            direction = _direction(row.improvement)
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
        sentences.append(
            f"{seeds_text(len(study.seeds))} are few: a variant without a difference shown may still differ."
        )
    if max(study.tried_counts.values(), default=0) > 1:
        sentences.append("Each is at the best of its points, which was chosen on the evaluation text itself.")
        sentences += filter(None, [uneven_text(study)])
    if not study.complete:
        sentences.append("The study is not complete.")
    return " ".join(sentences)


def findings(study: StudyResults) -> tuple[Finding, ...]:
    """Return a sentence for each variant: its difference to the baseline, the test, and what is wrong with it."""
    return tuple(_finding(study, name, study.chosen.get(name)) for name in study.others)


def _finding(study: StudyResults, name: str, row: Row | None) -> Finding:
    found, parameters = study.verdict(name), share_words(share(study, name))
    if row is None or row.improvement is None or row.loss is None:
        return Finding(name, f"was not compared{_why_not(study, row)}; it has {parameters}.", found.verdict)
    improvement, base = row.improvement, study.chosen.get(study.baseline)
    base_loss = decimal(base.loss.mean, 4) if base is not None and base.loss is not None else NOTHING
    losses = f"({decimal(row.loss.mean, 4)} against {base_loss} nats per token) with {parameters}"
    tested = f"(p = {p_text(found.p)}, after Holm's correction over {found.family} {p_text(found.p_corrected)})"
    if found.verdict == "not tested":
        size = f"{_size(study, name)} {_direction(improvement)}"
        clauses = [f"has a validation loss {size} {losses}; not tested ({found.why})"]
    elif found.verdict == "no difference shown":
        clauses = [f"no difference shown: {change_text(change_of(study, name))} improvement {losses} {tested}"]
    else:
        verb = "lowers" if found.verdict == "better" else "raises"
        clauses = [f"{verb} the validation loss by {_size(study, name)} {losses} {tested}"]
    if improvement.choices > 1:
        fold = f"{improvement.choices}-fold"
        clauses.append(f"interval and p are corrected {fold}, as one of the two was chosen from more points")
    if row.diverged:
        clauses.append(f"it {diverged_text(row.diverged)}")
    if row.missing:
        clauses.append(not_run_text(row.missing))
    return Finding(name, "; ".join(clauses) + ".", found.verdict)


def _direction(improvement: Improvement) -> str:
    return "lower" if improvement.mean > 0 else "higher"


def _size(study: StudyResults, name: str) -> str:
    """Return an improvement without its sign, which the direction says."""
    change = change_of(study, name)
    return size_text(change) if math.isfinite(change.low) else f"{decimal(abs(change.difference), 2)} %"


def _why_not(study: StudyResults, row: Row | None) -> str:
    """Return why a variant was not compared, after a colon; nothing where that is not known."""
    base = study.chosen.get(study.baseline)
    reasons = [] if row is not None else ["no run of it is finished"]
    if row is not None and not study.seed_values(row):
        reasons += [f"it {diverged_text(row.diverged)}"] if row.diverged else []
        reasons += [not_run_text(row.missing)] if row.missing else []
    if not reasons and (base is None or not base.best):
        reasons = [f"{study.baseline} has no best point to compare it with yet"]
    return f": {'; '.join(reasons)}" if reasons else ""
