"""The report's opening: what was found, in words with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hfpatch.reporting.numbers import (
    Change,
    Scale,
    count,
    decimal,
    digits_for,
    diverged_text,
    interval,
    listed,
    significant,
)
from hfpatch.reporting.results import Comparison, MethodOutcome, Results
from hfpatch.reporting.tables import told_change

Tone = Literal["better", "worse", "mixed", "within noise", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One sentence about one method: ``str()`` gives it whole, ``rest`` what follows the names of what is compared."""

    method: str
    rest: str
    tone: Tone
    against: str | None = None

    @property
    def subject(self) -> str:
        """What the sentence is about: the method, and what it is compared with where that is not the baseline."""
        return f"{self.method} against {self.against}" if self.against else self.method

    def __str__(self) -> str:
        return f"{self.subject} {self.rest}"


@dataclass(frozen=True)
class Answer:
    """A headline, one finding a method against the baseline, and one for each comparison between methods."""

    headline: str
    against_baseline: tuple[Finding, ...]
    against_others: tuple[Finding, ...]


def answer(results: Results) -> Answer:
    """Say what the run shows, from its paired comparisons on the tasks' primary metrics."""
    baseline = results.baseline
    others = [method for name, method in results.methods.items() if name != baseline]
    first = tuple(_finding(results, method, baseline, budget=True) for method in others)
    second = tuple(
        _finding(results, method, reference, budget=False)
        for method in others
        for reference in _references(results, method.name)
        if reference != baseline
    )
    return Answer(_headline(first, baseline), first, second)


def _references(results: Results, method: str) -> list[str]:
    return list(dict.fromkeys(c.reference for c in results.comparisons if c.method == method))


def _headline(findings: Sequence[Finding], baseline: str | None) -> str:
    if not findings or baseline is None:
        return "There is no method to compare with a baseline."
    tones = [finding.tone for finding in findings]
    told = [
        (tones.count("better"), "better on at least one task and worse on none"),
        (tones.count("mixed"), "better on one task and worse on another"),
        (tones.count("worse"), "worse on at least one task and better on none"),
        (tones.count("within noise"), "within noise on every task"),
        (tones.count("unknown"), "without a verdict"),
    ]
    parts = [f"{number} {'is' if number == 1 else 'are'} {what}" for number, what in told if number]
    plural = "method" if len(findings) == 1 else "methods"
    return f"Of {len(findings)} {plural} against {baseline}: {listed(parts)}."


def _finding(results: Results, method: MethodOutcome, reference: str | None, *, budget: bool) -> Finding:
    made = [results.comparison(method.name, task, reference) for task in results.tasks]
    comparisons = [comparison for comparison in made if comparison is not None]
    at = _budget(results, method) if budget else ""
    if not comparisons:
        why = f"{diverged_text(method.diverged)}: it " if method.diverged else ""
        return Finding(method.name, f"{why}was not compared with {reference or 'a baseline'}{at}.", "unknown")
    against = None if budget else reference
    better, worse, noise, untested = (
        [comparison for comparison in comparisons if comparison.verdict == verdict]
        for verdict in ("better", "worse", "within noise", "too few documents")
    )
    fallen = [comparison for comparison in noise if comparison.falls_to_correction]
    unseen = [comparison for comparison in noise if not comparison.falls_to_correction]
    clauses = [_seen(results, better)] if better else []
    if worse:
        clauses.append(f"{'it is worse elsewhere: it' if better else 'is worse: it'} {_seen(results, worse)}")
    if fallen:
        clauses.append(f"it {_seen(results, fallen)}, which is not significant after Holm's correction")
    if unseen:
        clauses.append(_unseen(results, unseen))
    if untested:
        tasks, sizes = listed([one.task for one in untested]), listed(_once([count(one.n) for one in untested]))
        clauses.append(f"on {tasks} there are too few documents for a verdict (n = {sizes})")
    if not better and not worse:
        clauses[0] = f"shows no significant difference{at}: {clauses[0]}"
    else:
        clauses[0] += at
    return Finding(method.name, "; ".join(clauses) + ".", _tone([*better, *worse, *noise]), against)


def _tone(seen: Sequence[Comparison]) -> Tone:
    verdicts = {comparison.verdict for comparison in seen}
    if {"better", "worse"} <= verdicts:
        return "mixed"
    tones: tuple[Tone, ...] = ("better", "worse", "within noise")
    return next((tone for tone in tones if tone in verdicts), "unknown")


def _seen(results: Results, comparisons: Sequence[Comparison]) -> str:
    """Tell the differences that were seen, each verb once for all that share it."""
    clauses = []
    for verb, sign in (("raises", 1), ("lowers", -1)):
        told = [_change(results, comparison) for comparison in comparisons if sign * comparison.difference > 0]
        clauses += [f"{verb} {listed(told)}"] if told else []
    return ", and ".join(clauses)


def _change(results: Results, comparison: Comparison) -> str:
    change = told_change(results, comparison)
    metric = "" if change.scale is Scale.POINTS else f" {comparison.metric.replace('_', ' ')}"
    return f"{comparison.task}{metric} by {size_text(change)}"


def size_text(change: Change) -> str:
    """Tell a change without its sign, which the verb has told."""
    sign = 1 if change.difference > 0 else -1
    low, high = sorted((sign * change.low, sign * change.high))
    digits = digits_for(change)
    return f"{decimal(abs(change.difference), digits)}{_unit(change)} {interval(low, high, digits)}"


def _unseen(results: Results, comparisons: Sequence[Comparison]) -> str:
    """Say on which tasks there is no significant difference, and which one could have been detected."""
    tasks = listed([comparison.task for comparison in comparisons])
    told = f"on {tasks} there is no significant difference"
    documents = f"n = {listed(_once([count(c.n) for c in comparisons]))}"
    changes = [told_change(results, comparison) for comparison in comparisons]
    visible = [(change.smallest_visible, _unit(change)) for change in changes]
    sizes = [significant(size, 2) + unit for size, unit in visible if size is not None]
    if len(sizes) < len(visible):
        return f"{told} ({documents})"
    sizes, unit = _once(sizes), visible[0][1]
    if all(size.endswith(unit) for size in sizes):
        sizes = [*(size.removesuffix(unit) for size in sizes[:-1]), sizes[-1]]
    return f"{told} ({documents}; smallest detectable difference {listed(sizes)})"


def _once(items: list[str]) -> list[str]:
    """Return one item where all are the same, else all."""
    return items[:1] if len(set(items)) == 1 else items


def _unit(change: Change) -> str:
    return f" {change.scale.value}" if change.scale.value else ""


def _budget(results: Results, method: MethodOutcome) -> str:
    if method.trainable is None:
        return ""
    control = control_for(results, method)
    if control is None or not control.trainable:
        return f" with {count(method.trainable)} trainable parameters"
    return f" at {method.trainable / control.trainable:.2f} times the parameters of {control.name}"


def control_for(results: Results, method: MethodOutcome) -> MethodOutcome | None:
    """Return the plain LoRA method that a method's parameter count is measured by.

    The one matched to it comes first, then the nearest in parameters; None for a plain LoRA itself.
    """
    if _is_lora(method):
        return None
    plain = [other for other in results.methods.values() if _is_lora(other) and other.trainable]
    matched = next((other for other in plain if other.match is not None and other.match.to == method.name), None)
    if matched is not None or not plain:
        return matched
    return min(plain, key=lambda other: abs((other.trainable or 0) - (method.trainable or 0)))


def _is_lora(method: MethodOutcome) -> bool:
    return bool(method.parts) and all(part.get("type") == "lora" for part in method.parts)
