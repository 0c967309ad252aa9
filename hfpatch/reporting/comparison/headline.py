"""The headline of a comparison: one row a method, ranked, and one sentence.

A gain is the difference to the baseline with the sign that makes better positive. Of a group of tasks it is the mean
over tasks of differences and of both ends of their 95 % intervals. As the standard error of a mean is at most the mean
of the standard errors, however the tasks depend on each other, that interval is not too narrow.

Methods are ordered by their gain on held-out text, or on tasks where no held-out text was scored. A rank is a range
where intervals overlap: ``1 + `` the number of methods whose whole interval is above, to ``n - `` the number of those
whose whole interval is below. So two methods whose ranks overlap are not shown to differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hfpatch.reporting.comparison.answer import control_for, is_lora, tone_of
from hfpatch.reporting.comparison.tables import scale_of_task
from hfpatch.reporting.document import Tone
from hfpatch.reporting.numbers import Change, Scale, change, diverged_text, listed
from hfpatch.results.schema import Comparison, ComparisonResults, Method, Task

LOW_NOISE = "bits_per_byte"
"""Of text, or of the right answer: far less noisy than an accuracy; lower is better."""
_MATCHED = 0.01
"""Share by which two parameter counts may differ and still count as matched, without a solved ``match``."""
_MOST_NAMED = 2


@dataclass(frozen=True)
class Measure:
    """What a column of gains shows.

    Attributes:
        tasks: the tasks whose mean it is; none where it is the loss on text held out of the training text.
        metrics: the metric of each task.
        scale: the scale of the gains.
        unit: what one unit of a gain is.
        left_out: how many tasks of the group are left out, as their unit is another.
    """

    tasks: tuple[str, ...]
    metrics: tuple[str, ...]
    scale: Scale
    unit: str
    left_out: int = 0


@dataclass(frozen=True)
class Gain:
    """A gain in its measure's unit; the ends of ``change`` are infinite where nothing was tested.

    ``tone`` is the verdict of the corrected tests: better, worse, or better on one task and worse on another.
    """

    change: Change
    tone: Tone

    @property
    def value(self) -> float:
        """The gain; above 0 is better than the baseline."""
        return self.change.difference


@dataclass(frozen=True)
class Line:
    """One method: its rank, its gains, and its verdict against the matched LoRA, or the baseline where no LoRA is.

    ``control`` is the LoRA, ``ratio`` the method's parameters over the LoRA's.
    """

    method: str
    rank: tuple[int, int] | None
    text: Gain | None
    tasks: Gain | None
    trainable: int
    control: str | None
    ratio: float | None
    verdict: str
    tone: Tone


@dataclass(frozen=True)
class Headline:
    """The lines in the order of the ranks; ``reference`` is what verdicts compare with: None is each line's LoRA."""

    text: Measure | None
    tasks: Measure | None
    lines: tuple[Line, ...]
    reference: str | None
    sentence: str


def headline(results: ComparisonResults) -> Headline:
    """Return what a reader who has one minute must know of a comparison."""
    text, tasks = measures(results)
    gains = [{name: _gain(results, measure, name) for name in results.others} for measure in (text, tasks)]
    first = gains[0] if any(gains[0].values()) else gains[1]
    ranks = _ranks(first)
    reference = None if any(map(is_lora, results.methods.values())) else results.baseline
    lines = []
    for name in sorted(results.others, key=lambda name: _place(results.methods[name], first[name])):
        control = reference or _control(results, name)
        verdict, tone = _verdict(results, name, control, (text, tasks))
        trainable = results.methods[name].trainable
        size = results.methods[control].trainable if control else 0
        ratio = trainable / size if size else None
        lines.append(
            Line(name, ranks.get(name), gains[0][name], gains[1][name], trainable, control, ratio, verdict, tone)
        )
    return Headline(text, tasks, tuple(lines), reference, _sentence(results, lines, reference))


def measures(results: ComparisonResults) -> tuple[Measure | None, Measure | None]:
    """Return what the gains on held-out text and on tasks are measured by; None where nothing was scored."""
    text = [task for task, info in results.tasks.items() if _is_text(info)]
    others = [task for task in results.tasks if task not in text]
    return _measure(results, text) or _loss(results), _measure(results, others)


def _is_text(task: Task) -> bool:
    return "perplexity" in task.primary or LOW_NOISE in task.primary


def _measure(results: ComparisonResults, tasks: Sequence[str]) -> Measure | None:
    """Return bits per byte where all the tasks have them, else the primary metrics of those of one unit."""
    if not tasks or results.baseline is None:
        return None
    if all(_has_low_noise(results, task) for task in tasks):
        return Measure(tuple(tasks), (LOW_NOISE,) * len(tasks), Scale.RAW, "bits per byte saved")
    scales = {task: scale_of_task(results, task) for task in tasks}
    scale = next(each for each in (Scale.POINTS, Scale.RELATIVE, Scale.RAW) if each in scales.values())
    kept = [task for task in tasks if scales[task] is scale]
    if scale is Scale.RAW:
        kept = [task for task in kept if results.tasks[task].primary == results.tasks[kept[0]].primary]
    metrics = tuple(results.tasks[task].primary for task in kept)
    names = listed(list(dict.fromkeys(metrics)))
    unit = {Scale.POINTS: f"points of {names}", Scale.RELATIVE: f"% lower {names}", Scale.RAW: names}[scale]
    return Measure(tuple(kept), metrics, scale, unit, len(tasks) - len(kept))


def _has_low_noise(results: ComparisonResults, task: str) -> bool:
    """Say whether a task was compared by bits per byte, or where nothing was compared yet, scored by them."""
    if results.comparisons:
        return any(each.task == task and each.metric == LOW_NOISE for each in results.comparisons)
    return bool(results.values(str(results.baseline), task, LOW_NOISE))


def _loss(results: ComparisonResults) -> Measure | None:
    return None if _base_loss(results) is None else Measure((), (), Scale.RAW, "nats per token saved")


def _base_loss(results: ComparisonResults) -> float | None:
    """Return the base's loss on the text that was held out of the training text, in nats per token."""
    loss = (results.data.get("held_out") or {}).get("base_loss")
    return loss if isinstance(loss, int | float) else None


def _final_losses(method: Method) -> list[float]:
    """Return each seed's loss on that text at the end of its training."""
    trains = [run.train for run in method.runs.values() if run.train is not None and run.diverged_step is None]
    return [train.final_eval_loss for train in trains if train.final_eval_loss is not None]


def _gain(results: ComparisonResults, measure: Measure | None, name: str) -> Gain | None:
    """Return a method's gain, without an interval where nothing was tested; None where a score is missing."""
    if measure is None or results.baseline is None:
        return None
    if not measure.tasks:
        base, losses = _base_loss(results), _final_losses(results.methods[name])
        return _untested([base - fmean(losses)], measure) if losses and base is not None else None
    pairs = list(zip(measure.tasks, measure.metrics, strict=True))
    made = [results.comparison(name, task, results.baseline, metric) for task, metric in pairs]
    compared = [each for each in made if each is not None]
    if len(compared) == len(pairs):
        changes = [_oriented(results, each, measure.scale) for each in compared]
        low, high = (fmean(ends) for ends in zip(*((each.low, each.high) for each in changes), strict=True))
        mean = Change(fmean(each.difference for each in changes), low, high, None, measure.scale)
        return Gain(mean, tone_of(compared))
    differences = [_difference_of_means(results, name, task, metric, measure.scale) for task, metric in pairs]
    known = [each for each in differences if each is not None]
    return _untested(known, measure) if len(known) == len(pairs) else None


def _untested(differences: Sequence[float], measure: Measure) -> Gain:
    return Gain(Change(fmean(differences), -math.inf, math.inf, None, measure.scale), "unknown")


def _oriented(results: ComparisonResults, found: Comparison, scale: Scale) -> Change:
    """Return a comparison in the unit of ``scale``, turned so that above 0 is better."""
    values = results.values(found.reference, found.task, found.metric)
    reference = fmean(values) if values else None
    each = change(found.difference, found.low, found.high, None, scale=scale, reference=reference)
    if _higher_is_better(results, found.task, found.metric):
        return each
    return Change(-each.difference, -each.high, -each.low, None, each.scale)


def _difference_of_means(results: ComparisonResults, name: str, task: str, metric: str, scale: Scale) -> float | None:
    ours, theirs = (results.values(each, task, metric) for each in (name, str(results.baseline)))
    if not ours or not theirs:
        return None
    reference = fmean(theirs)
    found = change(fmean(ours) - reference, 0.0, 0.0, None, scale=scale, reference=reference).difference
    return found if _higher_is_better(results, task, metric) else -found


def _higher_is_better(results: ComparisonResults, task: str, metric: str) -> bool:
    return metric != LOW_NOISE and results.tasks[task].higher_is_better


def _ranks(gains: Mapping[str, Gain | None]) -> dict[str, tuple[int, int]]:
    """Return the range of ranks that each method's interval leaves open; none where no interval is finite."""
    changes = {name: gain.change for name, gain in gains.items() if gain is not None}
    if not any(math.isfinite(each.low) for each in changes.values()):
        return {}
    lows, highs = ([getattr(each, end) for each in changes.values()] for end in ("low", "high"))
    return {
        name: (1 + sum(low > each.high for low in lows), len(changes) - sum(high < each.low for high in highs))
        for name, each in changes.items()
    }


def _place(method: Method, gain: Gain | None) -> tuple[bool, float]:
    """Order by gain, the highest first; what has none comes last."""
    return gain is None, 0.0 if gain is None else -gain.value


def _control(results: ComparisonResults, name: str) -> str | None:
    """Return the plain LoRA that a method is compared with: the matched one, else the nearest in parameters."""
    nearest = control_for(results, name)
    if nearest is None:
        return None
    size, others = (
        results.methods[name].trainable,
        {each.reference for each in results.comparisons if each.method == name},
    )
    match = results.methods[nearest].match
    if nearest in others or (match is not None and match.to == name):
        return nearest
    compared = [other for other in others if other in results.methods and is_lora(results.methods[other])]
    return min(compared, key=lambda other: abs(results.methods[other].trainable - size), default=None)


def _verdict(
    results: ComparisonResults, name: str, control: str | None, columns: Sequence[Measure | None]
) -> tuple[str, Tone]:
    """Return what the corrected tests against a method's control say, by the metrics of the columns."""
    method = results.methods[name]
    lost = len(method.diverged)
    if lost == len(method.runs) and lost:
        return diverged_text(method.diverged), "unknown"
    if not method.runs:
        return "not finished", "unknown"
    ending = f"; {lost} of {len(method.runs)} seeds diverged" if lost else ""
    if control != results.baseline and is_lora(method):
        return f"is a LoRA{ending}", "unknown"
    if not results.complete and not results.comparisons:
        return f"not tested yet{ending}", "unknown"
    if control is None:
        return f"no matched LoRA{ending}", "unknown"
    pairs = [pair for each in columns if each for pair in zip(each.tasks, each.metrics, strict=True)]
    made = [results.comparison(name, task, control, metric) for task, metric in pairs]
    found = [each for each in made if each is not None]
    if not found:
        other = results.methods[control]
        diverged = len(other.diverged) == len(other.runs) > 0
        return f"not compared{f', {control} diverged' if diverged else ''}{ending}", "unknown"
    text = _words(found)
    return f"{text}{'' if _is_matched(results, name, control) else ', sizes differ'}{ending}", tone_of(found)


def _words(found: Sequence[Comparison]) -> str:
    parts = []
    for verdict in ("better", "worse"):
        tasks = [each.task for each in found if each.verdict == verdict]
        if tasks:
            where = listed(tasks) if len(tasks) <= _MOST_NAMED else f"{len(tasks)} of {len(found)} tasks"
            parts.append(f"{verdict} on {where}")
    if parts:
        return ", ".join(parts)
    untested = all(each.verdict == "too few documents" for each in found)
    return "too few documents" if untested else "no difference shown"


def _is_matched(results: ComparisonResults, name: str, control: str) -> bool:
    if control == results.baseline:
        return True
    method, other = results.methods[name], results.methods[control]
    solved = other.match is not None and other.match.to == name
    return solved or abs(other.trainable - method.trainable) <= _MATCHED * method.trainable


def _sentence(results: ComparisonResults, lines: Sequence[Line], reference: str | None) -> str:
    """Count in one sentence what the corrected tests show."""
    if not lines or results.baseline is None:
        return "There is no method to compare with a baseline."
    if not results.comparisons:
        why = (
            "No paired comparison was made" if results.complete else "The run is not complete and nothing is tested yet"
        )
        return f"{why}: no difference is shown."
    gained = [
        _counted([line.text.tone for line in lines if line.text], "on held-out text"),
        _counted([line.tasks.tone for line in lines if line.tasks], "on at least one task"),
    ]
    clauses = [f"Of {len(lines)} method{'s' * (len(lines) != 1)}, " + listed([each for each in gained if each])]
    if not any(gained):
        clauses = [f"Of {len(lines)} method{'s' * (len(lines) != 1)} none was tested against {results.baseline}"]
    if reference is None:
        clauses.append(_against_lora([line.tone for line in lines if not is_lora(results.methods[line.method])]))
    if any(line.rank and line.rank[0] != line.rank[1] for line in lines):
        clauses.append("between methods whose ranks overlap no difference is shown")
    if max((each.seeds for each in results.comparisons), default=0) == 1:
        clauses.append("with one seed each, the intervals do not cover the variation from seed to seed")
    return "; ".join(clauses) + "."


def _counted(tones: Sequence[Tone], where: str) -> str:
    tested = [tone for tone in tones if tone != "unknown"]
    if not tested:
        return ""
    better, worse, mixed = (tested.count(tone) for tone in ("better", "worse", "mixed"))
    text = f"{better} gain{'s' * (better == 1)} {where}"
    losing = [f"{worse} lose{'s' * (worse == 1)}"] if worse else []
    losing += [f"{mixed} gain{'s' * (mixed == 1)} on one and lose{'s' * (mixed == 1)} on another"] if mixed else []
    return f"{text} ({listed(losing)})" if losing else text


def _against_lora(tones: Sequence[Tone]) -> str:
    better, worse, mixed, same = (tones.count(tone) for tone in ("better", "worse", "mixed", "within noise"))
    untested = len(tones) - better - worse - mixed - same
    if untested == len(tones):
        return "none was tested against a matched LoRA"
    parts = [f"{better or 'none'} {'are' if better > 1 else 'is'} better"]
    parts += [f"{worse} {'is' if worse == 1 else 'are'} worse"] if worse else []
    parts += [f"{mixed} {'is' if mixed == 1 else 'are'} better on one task and worse on another"] if mixed else []
    parts += [f"for {same} no difference is shown"] if same else []
    parts += [f"{untested} {'was' if untested == 1 else 'were'} not tested"] if untested else []
    return f"against LoRA {listed(parts)}"
