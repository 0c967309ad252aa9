"""What a comparison found, in words with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfpatch.recipes import pairs
from hfpatch.reporting.comparison.tables import change_of
from hfpatch.reporting.document import Finding, Tone
from hfpatch.reporting.floor import LEVELS, is_blind, shown_verdict
from hfpatch.reporting.numbers import count, diverged_text, listed, ratio, significant, size_text
from hfpatch.reporting.words import measured, metrics_text
from hfpatch.results.schema import Comparison, ComparisonResults, Method


@dataclass(frozen=True)
class Answer:
    """A headline, one finding a method against the baseline, and one for each comparison between methods."""

    headline: str
    against_baseline: tuple[Finding, ...]
    against_others: tuple[Finding, ...]


def answer(results: ComparisonResults) -> Answer:
    """Say what the run shows, from its paired comparisons on the tasks' primary metrics."""
    baseline = results.baseline
    first = tuple(_finding(results, method, baseline) for method in results.others)
    made = dict.fromkeys((each.method, each.reference) for each in results.comparisons if each.reference != baseline)
    order = {name: place for place, name in enumerate(results.others)}
    second = sorted((pair for pair in made if pair[0] in order), key=lambda pair: order[pair[0]])
    metrics = metrics_text(each.metric for each in results.comparisons if each.reference == baseline)
    return Answer(_headline(first, baseline, metrics), first, tuple(_finding(results, *pair) for pair in second))


def _headline(findings: Sequence[Finding], baseline: str | None, metrics: str) -> str:
    if not findings or baseline is None:
        return "There is no method to compare with a baseline."
    words: dict[Tone, str] = {
        "better": "better on at least one task and worse on none",
        "mixed": "better on one task and worse on another",
        "worse": "worse on at least one task and better on none",
        "within noise": "within noise on every task",
        "unknown": "without a verdict",
    }
    tones = [finding.tone for finding in findings]
    counts = {tone: tones.count(tone) for tone in words}
    parts = [f"{n} {'is' if n == 1 else 'are'} {words[tone]}" for tone, n in counts.items() if n]
    by = f", by the primary metric of each task ({metrics})" if metrics else ""
    return f"Of {len(findings)} method{'s' * (len(findings) != 1)} against {baseline}{by}: {listed(parts)}."


def _finding(results: ComparisonResults, name: str, reference: str | None) -> Finding:
    """Return one sentence: what is better and worse, what is not significant, and at which number of parameters."""
    method, with_baseline = results.methods[name], reference == results.baseline
    made = [results.comparison(name, task, reference) for task in results.tasks]
    known = [comparison for comparison in made if comparison is not None]
    comparisons = [each for each in known if not is_blind(results, each)]
    blind = [each for each in known if is_blind(results, each)]
    size = _relative_size(results, name) if with_baseline else ""
    if not known:
        why = f"{diverged_text(method.diverged)}: it " if method.diverged else ""
        return Finding(name, f"{why}was not compared with {reference or 'a baseline'}{size}.", "unknown")
    better, worse, noise, untested = (
        [comparison for comparison in comparisons if comparison.verdict == verdict]
        for verdict in ("better", "worse", "within noise", "too few documents")
    )
    fallen = [comparison for comparison in noise if comparison.falls_to_correction]
    others = [comparison for comparison in noise if not comparison.falls_to_correction]
    clauses = [_changes(results, better)] if better else []
    if worse:
        clauses.append(f"{'it is worse elsewhere: it' if better else 'is worse: it'} {_changes(results, worse)}")
    if fallen:
        clauses.append(f"it {_changes(results, fallen)}, which is not significant after Holm's correction")
    if others:
        clauses.append(_not_significant(results, others))
    if untested:
        sizes = listed(_once([count(one.n) for one in untested]))
        clauses.append(f"on {measured(untested)} there are too few documents for a verdict (n = {sizes})")
    for level in LEVELS:
        there = [one for one in blind if shown_verdict(results, one) == level]
        if there:
            clauses.append(f"on {measured(there)} {reference} is {level}, so nothing can be told")
    if better or worse:
        clauses[0] += size
    else:
        clauses[0] = f"shows no significant difference{size}: {clauses[0]}"
    subject = name if with_baseline else f"{name} against {reference}"
    return Finding(subject, "; ".join(clauses) + ".", tone_of([*better, *worse, *noise]))


def tone_of(tested: Sequence[Comparison]) -> Tone:
    """Return what several verdicts say together; ``unknown`` where nothing was tested."""
    verdicts = {comparison.verdict for comparison in tested}
    if {"better", "worse"} <= verdicts:
        return "mixed"
    tones: tuple[Tone, ...] = ("better", "worse", "within noise")
    return next((tone for tone in tones if tone in verdicts), "unknown")


def _changes(results: ComparisonResults, comparisons: Sequence[Comparison]) -> str:
    """Return ``raises a (acc) by … and b (acc) by …, and lowers c (word perplexity) by …``."""
    clauses = []
    for verb, sign in (("raises", 1), ("lowers", -1)):
        parts = []
        for comparison in comparisons:
            change = change_of(results, comparison)
            if sign * comparison.difference > 0:
                parts.append(f"{measured([comparison])} by {size_text(change)}")
        clauses += [f"{verb} {listed(parts)}"] if parts else []
    return ", and ".join(clauses)


def _not_significant(results: ComparisonResults, comparisons: Sequence[Comparison]) -> str:
    """Say on which tasks there is no significant difference, and which one could have been detected."""
    text = f"on {measured(comparisons)} there is no significant difference"
    documents = f"n = {listed(_once([count(c.n) for c in comparisons]))}"
    changes = [change_of(results, comparison) for comparison in comparisons]
    units = [f" {change.scale.value}".rstrip() for change in changes]
    sizes = [
        significant(change.smallest_visible, 2) + unit
        for change, unit in zip(changes, units, strict=True)
        if change.smallest_visible is not None
    ]
    if len(sizes) < len(changes):
        return f"{text} ({documents})"
    sizes, unit = _once(sizes), units[0]
    if all(size.endswith(unit) for size in sizes):
        sizes = [*(size.removesuffix(unit) for size in sizes[:-1]), sizes[-1]]
    return f"{text} ({documents}; smallest detectable difference {listed(sizes)})"


def _once(items: list[str]) -> list[str]:
    """Return one item where all are the same, else all."""
    return items[:1] if len(set(items)) == 1 else items


def _relative_size(results: ComparisonResults, name: str) -> str:
    trainable, control = results.methods[name].trainable, control_for(results, name)
    if control is None:
        return f" with {count(trainable)} trainable parameters"
    return f" at {ratio(trainable / results.methods[control].trainable)} times the parameters of {control}"


def control_for(results: ComparisonResults, name: str) -> str | None:
    """Return the plain LoRA method that a method's parameter count is compared with.

    The first of its match group comes first, then the nearest in parameters; None for a plain LoRA itself.
    """
    if is_lora(results.methods[name]):
        return None
    plain = {other: method for other, method in results.methods.items() if is_lora(method) and method.trainable}
    matched = next((other for other in plain if are_matched(results, name, other)), None)
    if matched is not None or not plain:
        return matched
    return min(plain, key=lambda other: abs(plain[other].trainable - results.methods[name].trainable))


def are_matched(results: ComparisonResults, one: str, other: str) -> bool:
    """Say whether one method's size was solved for the other's, or both for a third's."""
    anchors = {name: [method.match.to] if method.match else [] for name, method in results.methods.items()}
    return pairs.in_one_group(anchors, one, other)


def is_lora(method: Method) -> bool:
    """Say whether a method is LoRA and nothing else."""
    return pairs.is_lora(method.parts)
