"""What methods gain over the baseline, in one number each on held-out text and on tasks, and how they rank by it.

A gain is the difference to the baseline with the sign that makes better positive. Of several tasks it is the mean of
their differences, and of both ends of their 95 % intervals: as the standard error of a mean is at most the mean of the
standard errors, however the tasks depend on each other, this interval is not too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hfpatch.reporting.comparison.answer import tone_of
from hfpatch.reporting.comparison.measures import is_known, is_text, metric_of
from hfpatch.reporting.comparison.tables import scale_of_task
from hfpatch.reporting.document import Tone
from hfpatch.reporting.floor import is_blind
from hfpatch.reporting.numbers import Change, Scale, change, listed
from hfpatch.results.held_out import HELD_OUT
from hfpatch.results.low_noise import BITS_PER_BYTE, LOW_NOISE, MARGIN
from hfpatch.results.schema import ComparisonResults

NATS_SAVED = "nats per token saved"


@dataclass(frozen=True)
class Pooled:
    """What a column of gains shows: a measure, or the mean over several.

    Attributes:
        tasks: the tasks whose mean it is; none where it is the loss on text held out of the training text.
        metrics: the metric of each task.
        scale: the scale of the gains.
        unit: what one unit of a gain is.
        left_out: how many tasks of the group are left out, because their unit is another.
    """

    tasks: tuple[str, ...]
    metrics: tuple[str, ...]
    scale: Scale
    unit: str
    left_out: int = 0

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each task with its metric."""
        return list(zip(self.tasks, self.metrics, strict=True))


@dataclass(frozen=True)
class Measures:
    """What is shown of a comparison; None where nothing was scored.

    ``text`` is the text held out of the training text where its documents were compared, else that of the tasks that
    score text, else the untested loss on the first; ``text_tasks`` are those tasks where ``text`` is not. ``margin`` is
    there where tasks are measured by bits per byte, which alone do not say whether right answers gain on wrong ones.
    """

    text: Pooled | None
    text_tasks: Pooled | None
    tasks: Pooled | None
    margin: Pooled | None


@dataclass(frozen=True)
class Gain:
    """A gain in its measure's unit; the ends of ``change`` are infinite where nothing was tested.

    ``tone`` is what the corrected tests say: better, worse, or better on one task and worse on another.
    """

    change: Change
    tone: Tone

    @property
    def value(self) -> float:
        """The gain; above 0 is better than the baseline."""
        return self.change.difference

    @property
    def is_tested(self) -> bool:
        """Whether it has an interval."""
        return math.isfinite(self.change.low) and math.isfinite(self.change.high)


def pooled_measures(results: ComparisonResults) -> Measures:
    """Return what gains are measured by."""
    if results.baseline is None:
        return Measures(None, None, None, None)
    texts = [task for task, info in results.tasks.items() if is_text(info)]
    held_out = [task for task in texts if task == HELD_OUT]
    tasks = [task for task in results.tasks if task not in texts]
    answers = _measure(results, tasks)
    with_margin = tuple(task for task in tasks if is_known(results, task, MARGIN))
    margin = Pooled(with_margin, (MARGIN,) * len(with_margin), Scale.RAW, "nats", len(tasks) - len(with_margin))
    shown = answers is not None and BITS_PER_BYTE in answers.metrics and with_margin
    text = _measure(results, held_out or texts) or _loss(results)
    others = _measure(results, [task for task in texts if task != HELD_OUT]) if held_out else None
    return Measures(text, others, answers, margin if shown else None)


def _measure(results: ComparisonResults, tasks: Sequence[str]) -> Pooled | None:
    """Return bits per byte where all the tasks have them, else the primary metrics of those of one unit."""
    if not tasks:
        return None
    if all(metric_of(results, task) == BITS_PER_BYTE for task in tasks):
        return Pooled(tuple(tasks), (BITS_PER_BYTE,) * len(tasks), Scale.RAW, "bits per byte saved")
    scales = {task: scale_of_task(results, task) for task in tasks}
    scale = next(each for each in (Scale.POINTS, Scale.RELATIVE, Scale.RAW) if each in scales.values())
    kept = [task for task in tasks if scales[task] is scale]
    if scale is Scale.RAW:
        kept = [task for task in kept if results.tasks[task].primary == results.tasks[kept[0]].primary]
    if scale is Scale.RELATIVE and not all(results.mean(str(results.baseline), task) for task in kept):
        return None  # nothing is relative to 0, or to a score that is not there
    metrics = tuple(results.tasks[task].primary for task in kept)
    names = listed(list(dict.fromkeys(metrics)))
    raw = NATS_SAVED if kept == [HELD_OUT] else names
    unit = {Scale.POINTS: f"points of {names}", Scale.RELATIVE: f"% lower {names}", Scale.RAW: raw}[scale]
    return Pooled(tuple(kept), metrics, scale, unit, len(tasks) - len(kept))


def _loss(results: ComparisonResults) -> Pooled | None:
    return None if results.base_loss is None else Pooled((), (), Scale.RAW, NATS_SAVED)


def gain(results: ComparisonResults, measure: Pooled | None, name: str) -> Gain | None:
    """Return a method's gain, without an interval where nothing was tested; None where a score is missing."""
    if measure is None:
        return None
    if not measure.tasks:
        base, losses = results.base_loss, results.methods[name].held_out_losses.values()
        return _untested([base - fmean(losses)], measure) if losses and base is not None else None
    made = [results.comparison(name, task, results.baseline, metric) for task, metric in measure.pairs]
    compared = [each for each in made if each is not None]
    if len(compared) < len(made):
        differences = [
            _difference_of_means(results, name, task, metric, measure.scale) for task, metric in measure.pairs
        ]
        known = [each for each in differences if each is not None]
        return _untested(known, measure) if len(known) == len(made) else None
    changes = [
        _oriented(results, each.task, each.metric, (each.difference, each.low, each.high), measure.scale)
        for each in compared
    ]
    difference, low, high = (fmean(getattr(each, key) for each in changes) for key in ("difference", "low", "high"))
    return Gain(
        Change(difference, low, high, None, measure.scale),
        tone_of([each for each in compared if not is_blind(results, each)]),
    )


def _untested(differences: Sequence[float], measure: Pooled) -> Gain:
    return Gain(Change(fmean(differences), -math.inf, math.inf, None, measure.scale), "unknown")


def _difference_of_means(results: ComparisonResults, name: str, task: str, metric: str, scale: Scale) -> float | None:
    ours, theirs = (results.mean(each, task, metric) for each in (name, str(results.baseline)))
    if ours is None or theirs is None:
        return None
    return _oriented(results, task, metric, (ours - theirs, 0.0, 0.0), scale).difference


def _oriented(
    results: ComparisonResults, task: str, metric: str, ends: tuple[float, float, float], scale: Scale
) -> Change:
    """Return a difference to the baseline and its interval in the unit of ``scale``; above 0 is better."""
    reference = results.mean(str(results.baseline), task, metric)
    each = change(*ends, None, scale=scale, reference=reference)
    if LOW_NOISE.get(metric, results.tasks[task].higher_is_better):
        return each
    return Change(-each.difference, -each.high, -each.low, None, each.scale)


def ranks(gains: Mapping[str, Gain | None]) -> dict[str, tuple[int, int]]:
    """Return the range of ranks that each method's interval leaves open; none where there is no interval at all.

    It goes from ``1 + `` the number of methods whose whole interval is above this one to ``n - `` the number of those
    whose whole interval is below it. Methods whose intervals overlap have ranges that overlap, so ranges that do not
    are of methods that differ.
    """
    known = {name: each for name, each in gains.items() if each is not None}
    if not any(each.is_tested for each in known.values()):
        return {}
    lows, highs = ([getattr(each.change, end) for each in known.values()] for end in ("low", "high"))
    return {
        name: (
            1 + sum(low > each.change.high for low in lows),
            len(known) - sum(high < each.change.low for high in highs),
        )
        for name, each in known.items()
    }
