"""The opening of a study's report: which variants beat the baseline beyond the noise of the seeds."""

from __future__ import annotations

from collections.abc import Sequence

from hfpatch.reporting.answer import Answer, Finding, Tone, size_text
from hfpatch.reporting.numbers import Change, Scale, decimal, diverged_text, listed, p_text, signed, told
from hfpatch.reporting.study.results import Improvement, Row, StudyResults
from hfpatch.reporting.study.words import FEW_SEEDS, and_seeds, seeds_text, share_of, share_words

LEVEL = 0.05
"""At which a difference is told as one."""


def tone_of(row: Row | None) -> Tone:
    """Return a variant's verdict: by Holm's corrected p where there is one, else by p; unknown without either."""
    if row is None or row.improvement is None:
        return "unknown"
    p = row.improvement.p if row.improvement.p_holm is None else row.improvement.p_holm
    if p is None:
        return "unknown"
    if p >= LEVEL:
        return "within noise"
    return "better" if row.improvement.mean > 0 else "worse"


def falls_to_correction(improvement: Improvement) -> bool:
    """Whether the test alone finds a difference that does not stand after Holm's correction."""
    p, p_holm = improvement.p, improvement.p_holm
    return p is not None and p_holm is not None and p < LEVEL <= p_holm


def change_of(improvement: Improvement) -> Change | None:
    """Return an improvement in per cent of the baseline's loss; None where one seed gives it no interval."""
    if improvement.low is None or improvement.high is None:
        return None
    return Change(100 * improvement.mean, 100 * improvement.low, 100 * improvement.high, None, Scale.RELATIVE)


def improvement_text(improvement: Improvement | None) -> str:
    """Return ``+1.20 [1.00, 1.40] %``; without an interval the mean alone, without either nothing."""
    if improvement is None:
        return ""
    change = change_of(improvement)
    return told(change) if change else f"{signed(100 * improvement.mean, 2)} %"


def share(study: StudyResults, variant: str) -> float:
    """Return by which share a variant has more non-embedding parameters than the baseline."""
    here, base = study.variants[variant].parameters, study.variants[study.baseline].parameters
    return share_of(here.non_embedding, base.non_embedding)


def answer_of(study: StudyResults) -> Answer:
    """Say what the study shows, variant by variant against the baseline, each at its best point."""
    return Answer(_headline(study), tuple(_finding(study, name) for name in study.others), ())


def _headline(study: StudyResults) -> str:
    if not study.others:
        return f"There is no variant to compare with {study.baseline}."
    sentences = [_counts(study), _on_seeds(study)]
    if study.sweep:
        sentences.append("Each stands at the best of its sweep points, chosen on the evaluation text itself.")
    if not study.complete:
        sentences.append("The study is not complete.")
    return " ".join(sentence for sentence in sentences if sentence)


def _counts(study: StudyResults) -> str:
    tones = {name: _kind(study.chosen.get(name)) for name in study.others}
    parts = []
    for tone, words in (
        ("better", "better beyond the noise of the seeds"),
        ("worse", "worse beyond the noise of the seeds"),
        ("within noise", "within noise"),
        ("lower", "lower in loss, untested"),
        ("higher", "higher in loss, untested"),
        ("unknown", "not compared"),
    ):
        names = [name for name, each in tones.items() if each == tone]
        if names:
            plain = tone in ("within noise", "unknown")
            named = listed(names if plain else [_brief(study, name) for name in names])
            parts.append(f"{len(names)} {'is' if len(names) == 1 else 'are'} {words} ({named})")
    plural = "variant" if len(tones) == 1 else "variants"
    return f"Of {len(tones)} {plural} against {study.baseline}: {listed(parts)}."


def _kind(row: Row | None) -> str:
    """Return the verdict; of a variant that was compared and not tested, the direction of its loss."""
    tone = tone_of(row)
    if tone == "unknown" and row is not None and row.improvement is not None:
        return _direction(row.improvement)
    return tone


def _brief(study: StudyResults, name: str) -> str:
    """Return a variant with its difference and its parameters, as ``nonlinear: 1.20 % [1.00, 1.40] lower loss …``."""
    improvement = study.chosen[name].improvement
    if improvement is None:
        return name
    return f"{name}: {_size(improvement)} {_direction(improvement)} loss {share_words(share(study, name))}"


def _direction(improvement: Improvement) -> str:
    return "lower" if improvement.mean > 0 else "higher"


def _size(improvement: Improvement) -> str:
    """Tell an improvement without its sign, which a word tells."""
    change = change_of(improvement)
    return size_text(change) if change else f"{decimal(abs(100 * improvement.mean), 2)} %"


def _on_seeds(study: StudyResults) -> str:
    count = len(study.seeds)
    if count == 1:
        return "With one seed nothing is known about noise, so no variant is told better or worse."
    if count < FEW_SEEDS:
        return f"{seeds_text(count)} are few: what is within noise here may still differ."
    return ""


def _finding(study: StudyResults, name: str) -> Finding:
    row = study.chosen.get(name)
    tone = tone_of(row)
    budget = share_words(share(study, name))
    if row is None or row.improvement is None or row.loss is None:
        return Finding(name, f"was not compared{_why_not(study, row)}; {budget.replace('with', 'it has', 1)}.", tone)
    clauses = [_main_clause(study, row, row.improvement, tone, budget)]
    if falls_to_correction(row.improvement):
        clauses.append("the test alone finds a difference, which is not significant after Holm's correction")
    if row.diverged:
        clauses.append(f"it {diverged_text(row.diverged)}")
    if row.missing:
        clauses.append(f"{and_seeds(row.missing)} not run yet")
    return Finding(name, "; ".join(clauses) + ".", tone)


def _main_clause(study: StudyResults, row: Row, improvement: Improvement, tone: Tone, budget: str) -> str:
    losses = f"{_loss(row)} against {_loss(study.chosen.get(study.baseline))} nats per token"
    seeds = seeds_text(len(study.seed_values(row)))
    if tone == "unknown":
        return (
            f"has a validation loss {_size(improvement)} {_direction(improvement)} ({losses}) {budget}; with "
            f"{seeds} its noise is not known"
        )
    tested = f"p = {p_text(improvement.p)}, after Holm's correction {p_text(improvement.p_holm)}, {seeds}"
    if tone == "within noise":
        return f"is within noise: {improvement_text(improvement)} improvement ({losses}) {budget} ({tested})"
    verb = "lowers" if tone == "better" else "raises"
    return f"{verb} the validation loss by {_size(improvement)} ({losses}) {budget} ({tested})"


def _loss(row: Row | None) -> str:
    return decimal(row.loss.mean, 4) if row is not None and row.loss is not None else "an unknown loss of"


def _why_not(study: StudyResults, row: Row | None) -> str:
    """Return what kept a variant from being compared, behind a colon; nothing where that is not known."""
    base = study.chosen.get(study.baseline)
    reasons: Sequence[str] = ()
    if row is None:
        reasons = ["no run of it is finished"]
    elif row.loss is None or not study.seed_values(row):
        missing = [f"{and_seeds(row.missing)} not run yet"] if row.missing else []
        reasons = [*([f"it {diverged_text(row.diverged)}"] if row.diverged else []), *missing]
    if not reasons and (base is None or not base.best):
        reasons = [f"{study.baseline} has no best point to hold it against yet"]
    return f": {'; '.join(reasons)}" if reasons else ""
