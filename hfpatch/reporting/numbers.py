"""Numbers and names as text: units that fit the metric, few digits, a real minus sign."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean
from typing import Any

from hfpatch.errors import listed
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.recipes.retention import text_of
from hfpatch.results.cautions import level_at
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import ALPHA, FEWEST_DOCUMENTS
from hfpatch.results.forecast import PlannedQuestion
from hfpatch.results.low_noise import BITS_PER_BYTE, LOW_NOISE, is_share
from hfpatch.results.parts import NATS_PER_TOKEN, Clusters, Comparison
from hfpatch.results.verdicts import INCOMPLETE, Verdict

MINUS = "−"
NOTHING = "–"  # shown where there is no number
MOST_METHODS = 24  # that a figure shows, beside the baseline


class Scale(Enum):
    """The unit in which differences of a metric are reported."""

    POINTS = "points"  # of a share: percentage points
    RELATIVE = "%"  # of a positive size, such as a perplexity: relative to the reference
    RAW = ""  # of anything else: the metric's own unit


def scale_of(metric: str, higher_is_better: bool) -> Scale:
    """Return the unit in which differences of ``metric`` are reported."""
    if is_share(metric):
        return Scale.POINTS
    return Scale.RAW if higher_is_better or metric in (NATS_PER_TOKEN, BITS_PER_BYTE) else Scale.RELATIVE


@dataclass(frozen=True)
class Change:
    """A difference with its interval, in the unit of ``scale`` (points, per cent of the reference, or raw)."""

    difference: float
    low: float
    high: float
    scale: Scale
    factor: float = 1.0  # how many units of the scale the metric's unit is

    @property
    def turned(self) -> Change:
        """The difference with its sign turned, where lower is better."""
        return replace(self, difference=-self.difference, low=-self.high, high=-self.low)


def change(difference: float, low: float, high: float, *, scale: Scale, reference: float | None) -> Change:
    """Convert a difference and its interval from the metric's unit to that of ``scale``.

    Without ``reference``, the reference's own value, a relative change stays in the metric's unit.
    """
    if scale is Scale.RELATIVE and not reference:
        scale = Scale.RAW
    factor = {Scale.POINTS: 100.0, Scale.RELATIVE: 100.0 / (reference or 1.0), Scale.RAW: 1.0}[scale]
    return Change(difference * factor, low * factor, high * factor, scale, factor)


def scale_in(results: ComparisonResults, task: str, metric: str) -> Scale:
    """Return the scale in which differences of a task's metric are reported."""
    info = results.tasks.get(task)
    return scale_of(metric, LOW_NOISE.get(metric, info.higher_is_better if info else True))


def change_of(results: ComparisonResults, difference: Verdict | Comparison, *, plain: bool = True) -> Change:
    """Return a difference in its reported unit with its 95 % interval; not ``plain``, with that of the verdict."""
    task, metric, ends = difference.task, difference.metric, (difference.low, difference.high)
    if isinstance(difference, Verdict) and not plain:
        ends = difference.corrected_low, difference.corrected_high
    values = results.values(difference.pair[1], task, metric) if task in results.tasks else []
    scale = scale_in(results, task, metric)
    return change(difference.difference, *ends, scale=scale, reference=fmean(values) if values else None)


def gain_of(results: ComparisonResults, verdict: Verdict, *, plain: bool = False) -> Change | None:
    """Return a difference as a gain, above 0 is better, with its corrected interval; None if nothing is known."""
    if math.isnan(verdict.difference):
        return None
    gain = change_of(results, verdict, plain=plain)
    return gain if verdict.higher_is_better else gain.turned


def gain_on(results: ComparisonResults, method: str, task: str, *, plain: bool = False) -> Change | None:
    """Return the gain of a method over the baseline on a task, see `gain_of`; None where it was not compared."""
    verdict = results.verdict(method, task, results.baseline)
    return None if verdict is None else gain_of(results, verdict, plain=plain)


def verdict_text(results: ComparisonResults, verdict: Verdict) -> str:
    """Return a verdict in words: with its margin, why nothing was tested or decided, and what would decide it."""
    outcome, info = outcome_of(verdict, gain_of(results, verdict), sized=False), results.tasks.get(verdict.task)
    is_open = verdict.tone == "undecided" and not verdict.why and info is not None and verdict.metric == info.primary
    if is_open and (level := level_at(results, verdict.other, verdict.task)):
        outcome = replace(outcome, reasons=(*outcome.reasons, f"{verdict.other} {level}"))
    return str(outcome)


@dataclass(frozen=True)
class Outcome:
    """An outcome in words: ``worse by 0.045``, ``equivalent within 0.02``, ``undecided (needs 7 seeds)``.

    It comes in parts, of which tables and sentences leave out what stands beside them.
    """

    verb: str
    size: str  # of a difference, and whether it is less than the margin
    within: str  # which margin
    rates: str  # that it holds at the rates tried
    reasons: tuple[str, ...]  # why nothing was tested or decided, or what would decide it; in brackets

    def __str__(self) -> str:
        reasons = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.verb}{self.size}{self.within}{self.rates}{reasons}"


def outcome_of(verdict: Verdict, gain: Change | None = None, *, sized: bool = True) -> Outcome:
    """Return an outcome in words, in the unit of its gain; not ``sized``, where the number stands beside it."""
    verb, _, is_small = verdict.outcome.partition(" by ")
    margin, size = margin_text(verdict, gain), ""
    if gain is not None and sized and verdict.is_found:
        size = f"{'' if verb == 'lost' else ' by'} {size_text(gain)}{f', less than {margin}' if is_small else ''}"
    elif is_small:
        size = f" by less than {margin or 'the margin'}"
    why = why_text(verdict) or (f"needs {needs}" if (needs := needs_text(verdict)) else "")
    return Outcome(
        verb=verb,
        size=size,
        within=f" within {margin}" if margin and verdict.tone == "same" else "",
        rates=" at the rates tried" if verdict.at_rates_tried else "",
        reasons=(why,) if why else (),
    )


def why_text(verdict: Verdict) -> str:
    """Return why nothing was tested or decided, of too few groups with their number.

    Of a run that is not complete nothing, as its report says that once for all.
    """
    if verdict.why == INCOMPLETE:
        return ""
    if verdict.why == "too few groups" and verdict.clusters is not None:
        return f"{verdict.why}: {verdict.clusters.text}, and {FEWEST_DOCUMENTS} are needed"
    return verdict.why


def needs_text(asked: Verdict | PlannedQuestion) -> str:
    """Return what would decide an undecided pair, ``7 seeds or 900 documents``; nothing where it is not known.

    Where neither number alone would, more of both do: that makes every interval as narrow as one likes. Nothing
    decides a difference of 0 without a margin.
    """
    needs = [f"{asked.seeds_needed} seeds"] if asked.seeds_needed is not None else []
    if asked.documents_needed is not None:
        in_groups = isinstance(asked, Verdict) and asked.clusters is not None
        needs.append(f"{asked.documents_needed:,} {'groups' if in_groups else 'documents'}")
    is_open = isinstance(asked, Verdict) and asked.outcome == "undecided" and not asked.why
    if is_open and not needs and (asked.difference or asked.margin):
        return "more of both seeds and documents"
    return " or ".join(needs)


def margin_of(verdict: Verdict, gain: Change | None = None) -> float | None:
    """Return the margin of a verdict in the unit of its gain; None where it has none."""
    if verdict.margin is None:
        return None
    return verdict.margin * (gain.factor if gain is not None else 100 if is_share(verdict.metric) else 1)


def margin_text(verdict: Verdict, gain: Change | None = None) -> str:
    """Return the margin of a verdict with its unit, as ``1 %`` or ``0.02``; nothing where it has none."""
    margin = margin_of(verdict, gain)
    if margin is None:
        return ""
    unit = f" {gain.scale.value}".rstrip() if gain is not None else ""
    if is_share(verdict.metric):
        unit = " points" if margin != 1 else " point"
    return f"{margin:.3g}{unit}"


def unit_text(metric: str, scale: Scale) -> str:
    """Return the unit of a difference in words: ``nats per token``, ``points of acc``, ``% of word perplexity``."""
    return f"{scale.value} of {metric_text(metric)}" if scale.value else metric_text(metric)


def signed(value: float, digits: int) -> str:
    """Format with a sign and ``digits`` decimals; a rounded zero has no sign."""
    text = decimal(value, digits)
    return f"+{text}" if 0 < value < math.inf and float(text) != 0 else text


def decimal(value: float, digits: int) -> str:
    """Format with ``digits`` decimals; infinities and NaN in words that a table can hold."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else MINUS + "∞"
    text = f"{abs(value):.{digits}f}"
    return MINUS + text if value < 0 and float(text) != 0 else text


def digits_for(change: Change) -> int:
    """Return how many decimals a change is shown with: enough for two digits of its interval's width.

    There are up to three more where an end would be rounded to 0, so that an interval shows whether it leaves 0 out.
    Without an interval, or with one of no width, enough for two digits of the change.
    """
    span = change.high - change.low
    if not 0 < span < math.inf:
        span = abs(change.difference)
    if not 0 < span < math.inf:
        return 1
    most = 6 if change.scale is Scale.RAW else 4
    fitting = min(most, max(0, 1 - math.floor(math.log10(span))))
    if change.scale is not Scale.RAW:
        fitting = max(fitting, int(span < 100))
    ends = [abs(end) for end in (change.low, change.high) if end]
    shown = (digits for digits in range(fitting, fitting + 4) if all(end >= 0.5 * 10**-digits for end in ends))
    return next(shown, fitting)


def interval(low: float, high: float, digits: int) -> str:
    """Format an interval as ``[low, high]``."""
    return f"[{decimal(low, digits)}, {decimal(high, digits)}]"


def share_text(value: float, low: float, high: float) -> str:
    """Format a share with its interval, as ``97 % [95, 99]``; without one that is unbounded, and NaN as nothing."""
    ends = f" {interval(100 * low, 100 * high, 0)}" if math.isfinite(high - low) else ""
    return NOTHING if math.isnan(value) else f"{decimal(100 * value, 0)} %{ends}"


def interval_of(change: Change) -> str:
    """Format the interval of a change, see `digits_for`."""
    return interval(change.low, change.high, digits_for(change))


def change_text(change: Change) -> str:
    """Format a change with its interval, as ``+3.1 [1.2, 5.0] points``; without one where nothing was tested."""
    digits, ending = digits_for(change), f" {change.scale.value}".rstrip()
    if math.isinf(change.low) and math.isinf(change.high):
        return signed(change.difference, digits) + ending
    return f"{signed(change.difference, digits)} {interval_of(change)}{ending}"


def size_text(change: Change, *, unit: bool = True) -> str:
    """Format a change without its interval and its sign, which a verb has said, as ``3.1 points``."""
    return signed_size(change, unit=unit).lstrip("+" + MINUS)


def signed_size(change: Change, *, unit: bool = True) -> str:
    """Format a change with its sign and without its interval: ``−0.045``."""
    ending = f" {change.scale.value}".rstrip() if unit else ""
    if not math.isfinite(change.high - change.low):
        sign = {1: "+", -1: MINUS}.get((change.difference > 0) - (change.difference < 0), "")
        return sign + significant(abs(change.difference), 3) + ending
    # two digits, but at most one decimal more than beside the interval
    digits, size = digits_for(change), abs(change.difference)
    fitting = 1 - math.floor(math.log10(size)) if 0 < size < math.inf else digits
    return signed(change.difference, min(max(digits, fitting), digits + 1)) + ending


def score(value: float | None, scale: Scale) -> str:
    """Format a metric's value: shares in per cent, everything else to four significant digits."""
    if value is None:
        return NOTHING
    if scale is Scale.POINTS:
        return decimal(100 * value, 1) + " %" if math.isfinite(value) else decimal(value, 1)
    return significant(value, 4)


def significant(value: float, digits: int) -> str:
    """Format to ``digits`` significant digits without an exponent where that stays readable."""
    if not math.isfinite(value) or value == 0:
        return decimal(value, 0)
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, decimals)}f}".replace("-", MINUS)


def ratio(value: float) -> str:
    """Format a ratio of two sizes: two decimals, none from 100, and two significant digits where these are too few."""
    if value >= 0.1:
        return f"{value:.2f}" if value < 100 else count(value)
    return significant(value, 2) if value >= 0.001 else "under 0.001"


def times_text(value: float | None) -> str:
    """Format a ratio to two significant digits; None is one without a bound."""
    return "∞" if value is None else f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"


def count(value: float | None) -> str:
    """Format a whole number with thousands separators."""
    return NOTHING if value is None else f"{value:,.0f}"


def documents_text(n: int, clusters: Clusters | None) -> str:
    """Format a number of documents, as ``1,200`` or ``1,200 in 300 groups of passage``."""
    return count(n) if clusters is None else f"{count(n)} in {clusters.text}"


def p_text(value: float | None) -> str:
    """Format a p-value: ``0.031``, ``0.0042``, ``< 0.0001``; it stays on its side of the level of 5 %."""
    if value is None:
        return NOTHING
    digits = 4 if value < 0.01 else 3
    while (round(value, digits) < ALPHA) != (value < ALPHA):
        digits += 1
    return "< 0.0001" if value < 1e-4 else f"{value:.{digits}f}"


def short_count(value: float) -> str:
    """Format a whole number in three significant digits: ``950``, ``81.9k``, ``24.8M``."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit * 0.9995:
            text = f"{value / limit:.3g}"
            return f"{text}{unit}" if "e" not in text else f"{value / limit:.0f}{unit}"
    return f"{value:.0f}"


def memory(value: float | None) -> str:
    """Format bytes in MiB or GiB."""
    if value is None:
        return NOTHING
    mebibytes = value / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:,.1f} GiB"


def duration(seconds: float) -> str:
    """Format seconds as ``42 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def part_text(part: dict[str, Any]) -> str:
    """Describe one part of a method, as ``lora(r=64, target_modules=attention)``."""
    options = ", ".join(f"{key}={_option(value)}" for key, value in part.items() if key != "type")
    return f"{part.get('type', '?')}({options})" if options else str(part.get("type", "?"))


def _option(value: Any) -> str:
    return "+".join(map(_option, value)) if isinstance(value, list) else str(value)


def diverged_text(diverged: Mapping[int, int]) -> str:
    """Return ``diverged at step 340 (seed 2) and 360 (seed 0)``, or nothing."""
    steps = [f"{step:,} (seed {seed})" for seed, step in sorted(diverged.items(), key=lambda item: (item[1], item[0]))]
    return f"diverged at step {listed(steps)}" if steps else ""


def task_text(task: str) -> str:
    """Return the name of a task or a text as a sentence has it."""
    return "held-out text" if task == HELD_OUT else text_of(task)


def metric_text(metric: str) -> str:
    """Return the name of a metric in words."""
    return metric.replace("_", " ")
