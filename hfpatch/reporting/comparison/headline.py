"""The headline of a comparison: one row a method, ranked, and one sentence.

Methods are ordered by their gain on held-out text, or on tasks where no text was scored. A verdict is that of the
corrected paired tests against the matched LoRA: by the tasks' primary metrics, by bits per byte and by the margin. It
names the metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfpatch.reporting.comparison.answer import are_matched, control_for, is_lora, tone_of
from hfpatch.reporting.comparison.gains import Gain, Measures, gain, pooled_measures, ranks
from hfpatch.reporting.document import Tone
from hfpatch.reporting.floor import is_blind
from hfpatch.reporting.numbers import diverged_text, listed
from hfpatch.reporting.words import measured, metrics_text
from hfpatch.results.low_noise import BITS_PER_BYTE, MARGIN
from hfpatch.results.schema import Comparison, ComparisonResults

_MATCHED = 0.01
"""Share by which two parameter counts may differ and still count as matched, where no size was solved for."""
_MOST_NAMED = 2


@dataclass(frozen=True)
class Line:
    """One method.

    Attributes:
        method: its name.
        rank: the lowest and the highest rank that its interval leaves open.
        text: its gain on held-out text; likewise ``text_tasks``, ``tasks`` and ``margin``.
        trainable: how many parameters it trains.
        control: what the verdict compares with: the LoRA of its match group or one that it was compared with, or the
            baseline where there is no LoRA at all.
        ratio: its parameters over the LoRA's.
        verdict: what the tests say, in words; ``tone`` is the same for colours.
    """

    method: str
    rank: tuple[int, int] | None
    text: Gain | None
    text_tasks: Gain | None
    tasks: Gain | None
    margin: Gain | None
    trainable: int
    control: str | None
    ratio: float | None
    verdict: str
    tone: Tone


@dataclass(frozen=True)
class Headline:
    """The lines in the order of the ranks; ``reference`` is the baseline where verdicts compare with that."""

    measures: Measures
    lines: tuple[Line, ...]
    reference: str | None
    sentence: str


def headline(results: ComparisonResults) -> Headline:
    """Return what a reader who has one minute must know of a comparison."""
    shown = pooled_measures(results)
    text, text_tasks, tasks, margin = (
        {name: gain(results, each, name) for name in results.others}
        for each in (shown.text, shown.text_tasks, shown.tasks, shown.margin)
    )
    first = text if any(text.values()) else tasks
    ranked = ranks(first)
    reference = None if any(map(is_lora, results.methods.values())) else results.baseline
    lines = []
    for name in sorted(results.others, key=lambda name: _place(first[name])):
        control, trainable = reference or _control(results, name), results.methods[name].trainable
        size = results.methods[control].trainable if control else 0
        lines.append(
            Line(
                name,
                ranked.get(name),
                *(text[name], text_tasks[name], tasks[name], margin[name]),
                trainable,
                control,
                trainable / size if size else None,
                *_verdict(results, name, control, shown),
            )
        )
    return Headline(shown, tuple(lines), reference, _sentence(results, lines, reference, shown))


def _place(each: Gain | None) -> tuple[bool, float]:
    """Order by gain, the highest first; what has none comes last."""
    return each is None, 0.0 if each is None else -each.value


def _control(results: ComparisonResults, name: str) -> str | None:
    """Return the LoRA of a method's match group, else of those it was compared with the nearest in parameters."""
    nearest = control_for(results, name)
    if nearest is None or are_matched(results, name, nearest):
        return nearest
    size, compared = results.methods[name].trainable, {c.reference for c in results.comparisons if c.method == name}
    loras = [other for other, method in results.methods.items() if other in compared and is_lora(method)]
    return min(loras, key=lambda other: abs(results.methods[other].trainable - size), default=None)


def _verdict(results: ComparisonResults, name: str, control: str | None, shown: Measures) -> tuple[str, Tone]:
    """Return in words what the corrected tests of a method against its control say."""
    method = results.methods[name]
    lost, runs = len(method.diverged), len(method.runs)
    if not runs:
        return "not finished", "unknown"
    if method.all_diverged:
        return diverged_text(method.diverged), "unknown"
    ending = f"; {lost} of {runs} seeds diverged" if lost else ""
    found = _compared(results, name, control, shown) if control is not None else []
    if found:
        near = abs(results.methods[str(control)].trainable - method.trainable) <= _MATCHED * method.trainable
        matched = near or are_matched(results, name, str(control))
        differ = "" if matched or control == results.baseline else ", sizes differ"
        return f"{_words(found)}{differ}{ending}", tone_of(found)
    if is_lora(method):
        words = "is a LoRA"
    elif not results.comparisons and not results.complete:
        words = "not tested yet"
    elif control is None:
        words = "no matched LoRA"
    else:
        words = f"not compared{f', {control} diverged' if results.methods[control].all_diverged else ''}"
    return words + ending, "unknown"


def _compared(results: ComparisonResults, name: str, control: str, shown: Measures) -> list[Comparison]:
    """Return the comparisons that a verdict rests on; of text the one that is shown, which says it all."""
    text = [pair for each in (shown.text, shown.text_tasks) if each for pair in each.pairs]
    others = [task for task in results.tasks if task not in dict(text)]
    low_noise = (BITS_PER_BYTE, MARGIN) if shown.margin else (BITS_PER_BYTE,)
    pairs = text + [(task, metric) for task in others for metric in (results.tasks[task].primary, *low_noise)]
    made = [results.comparison(name, task, control, metric) for task, metric in dict.fromkeys(pairs)]
    return [each for each in made if each is not None and not is_blind(results, each)]


def _words(found: Sequence[Comparison]) -> str:
    """Return on which tasks, and by which metrics, a method is better and on which it is worse."""
    tasks, parts = {each.task for each in found}, []
    for verdict in ("better", "worse"):
        side = [each for each in found if each.verdict == verdict]
        many = len({each.task for each in side})
        several = f"{many} of {len(tasks)} tasks ({metrics_text(each.metric for each in side)})"
        if side:
            parts.append(f"{verdict} on {measured(side) if many <= _MOST_NAMED else several}")
    if parts:
        return ", ".join(parts)
    untested = all(each.verdict == "too few documents" for each in found)
    words = "too few documents" if untested else "no difference shown"
    return f"{words} ({metrics_text(each.metric for each in found)})"


def _sentence(results: ComparisonResults, lines: Sequence[Line], reference: str | None, shown: Measures) -> str:
    """Count in one sentence what the corrected tests show."""
    if not lines or results.baseline is None:
        return "There is no method to compare with a baseline."
    if not results.comparisons:
        why = "No paired comparison was made" if results.complete else "The run is not complete; nothing is tested yet"
        return f"{why}, so no difference is shown."
    by = [f" ({metrics_text(each.metrics)})" if each else "" for each in (shown.text, shown.text_tasks, shown.tasks)]
    gained = [
        _counted([line.text.tone for line in lines if line.text], *[f"on held-out text{by[0]}"] * 2),
        _counted([line.text_tasks.tone for line in lines if line.text_tasks], *[f"on text tasks{by[1]}"] * 2),
        _counted(
            [line.tasks.tone for line in lines if line.tasks], f"on at least one task{by[2]}", f"on any task{by[2]}"
        ),
    ]
    many = f"Of {len(lines)} method{'s' * (len(lines) != 1)}"
    tested = [each for each in gained if each]
    clauses = [
        f"{many}, by the corrected tests {listed(tested)}"
        if tested
        else f"{many}, none was tested against {results.baseline}"
    ]
    if reference is None:
        others = [line for line in lines if not is_lora(results.methods[line.method])]
        pairs = [(line.method, line.control) for line in others if line.control is not None]
        found = [each for pair in pairs for each in _compared(results, *pair, shown)]
        clauses.append(_against_lora([line.tone for line in others], metrics_text(each.metric for each in found)))
    if any(line.rank and line.rank[0] != line.rank[1] for line in lines):
        clauses.append("where ranks overlap, no order is claimed")
    if max(each.seeds for each in results.comparisons) == 1:
        clauses.append("with one seed each, the intervals do not cover the variation from seed to seed")
    return "; ".join(clauses) + "."


def _counted(tones: Sequence[Tone], where: str, nowhere: str) -> str:
    """Return how many methods gain and how many lose; ``nowhere`` is where none gains."""
    if all(tone == "unknown" for tone in tones):
        return ""
    better, worse, mixed = (tones.count(tone) for tone in ("better", "worse", "mixed"))
    losing = [f"{worse} lose{'s' * (worse == 1)}"] if worse else []
    losing += [f"{mixed} gain{'s' * (mixed == 1)} on one and lose{'s' * (mixed == 1)} on another"] if mixed else []
    gaining = f"{better} gain{'s' * (better == 1)} {where}" if better else f"none gains {nowhere}"
    return f"{gaining} ({listed(losing)})" if losing else gaining


def _against_lora(tones: Sequence[Tone], metrics: str) -> str:
    better, worse, mixed, same = (tones.count(tone) for tone in ("better", "worse", "mixed", "within noise"))
    untested = len(tones) - better - worse - mixed - same
    if untested == len(tones):
        return "none was tested against a matched LoRA"
    parts = [f"{better or 'none'} {'are' if better > 1 else 'is'} better"]
    parts += [f"{worse} {'is' if worse == 1 else 'are'} worse"] if worse else []
    parts += [f"{mixed} {'is' if mixed == 1 else 'are'} better on one task and worse on another"] if mixed else []
    parts += [f"for {same} no difference is shown"] if same else []
    parts += [f"{untested} {'was' if untested == 1 else 'were'} not tested"] if untested else []
    return f"against LoRA ({metrics}) {listed(parts)}"
