"""Which part of a method carries its effect: each method beside the controls that keep one part of it alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import scipy  # its parts are imported where they are first used

from hfpatch.recipes.controls import Control, controls_of
from hfpatch.reporting.comparison.measures import UNTESTED, Measure, measures
from hfpatch.reporting.comparison.tables import change_of
from hfpatch.reporting.document import Column, Finding, Findings, Row, Section, Table, Text, Tone
from hfpatch.reporting.numbers import NOTHING, Scale, change_text, count, decimal, listed, scale_of, significant
from hfpatch.reporting.words import metric_text
from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.schema import Comparison, ComparisonResults

_HALF = 0.5
_CAPTION = (
    "The first line of a group is the gain of the method over the baseline; below it, the share of that gain that each "
    "of its controls reaches, with a 95 % interval (Fieller's, which knows that both gains are measured on the same "
    "documents and seeds; of a perplexity, from its logarithm). A share is given only where the method itself is "
    "significantly better than the baseline. Each part was trained without the others, so shares need not add up."
)
_RULE = (
    "The sentence speaks of the first measure, from the left of the table, on which the method is significantly "
    "better. A part carries most of the effect where the whole interval of its share is above 50 %."
)


@dataclass(frozen=True)
class Share:
    """What share of a method's gain a control reaches, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (decimal(100 * each, 0) for each in (self.value, self.low, self.high))
        return f"{value} % [{low}, {high}]"


@dataclass(frozen=True)
class Gains:
    """The gains of a method and of its control over the baseline.

    A reach is half the length of a 95 % interval: the quantile of its distribution times the standard error. The
    product of the reaches is that quantile squared times the covariance of the gains.
    """

    method: float
    control: float
    method_reach: float
    control_reach: float
    product: float

    def share(self) -> Share | None:
        """Return control / method with Fieller's interval: all r whose c - r m is not beyond its own 95 % reach.

        Returns:
            The share; None where the interval is not bounded, as the method's gain may be 0, or the gain is a loss.
        """
        a = self.method**2 - self.method_reach**2
        b = self.method * self.control - self.product
        c = self.control**2 - self.control_reach**2
        if not (a > 0 and self.method > 0 and math.isfinite(b) and math.isfinite(c)):
            return None
        root = math.sqrt(max(0.0, b * b - a * c))
        return Share(self.control / self.method, (b - root) / a, (b + root) / a)


def attribution(results: ComparisonResults) -> Iterator[Section]:
    """Yield a section with every method that has controls; nothing where none has, or nothing was compared."""
    groups = controls_of({name: method.parts for name, method in results.methods.items()})
    if groups and results.comparisons:
        findings = Findings(tuple(_finding(results, name, controls) for name, controls in groups.items()))
        blocks = (findings, Text(_RULE, "caption"), _table(results, groups))
        yield Section("attribution", "Which part carries the effect", blocks, "Attribution")


def share(results: ComparisonResults, method: str, control: str, measure: Measure) -> Share | None:
    """Return what share of a method's gain a control reaches; None where that is not known."""
    gains = _on_task(results, method, control, measure) if measure.task else _held_out(results, method, control)
    return None if gains is None else gains.share()


def _on_task(results: ComparisonResults, method: str, control: str, measure: Measure) -> Gains | None:
    """Return the gains on a task, if the method's is significant after correction.

    The reach of the difference between the two methods gives the product: reach(m - c)² = reach(m)² + reach(c)² -
    2 product. Where it is missing, the gains are taken as independent.
    """
    pairs = [(method, results.baseline), (control, results.baseline), (method, control)]
    made = [results.comparison(one, measure.task, other, measure.metric) for one, other in pairs]
    if made[0] is None or made[1] is None or made[0].verdict != "better":
        return None
    (m, m_reach), (c, c_reach), (_, between) = (_estimate(results, each) for each in made)
    product = (m_reach**2 + c_reach**2 - between**2) / 2 if made[2] is not None else 0.0
    most = m_reach * c_reach
    return Gains(m, c, m_reach, c_reach, min(most, max(-most, product)))


def _held_out(results: ComparisonResults, method: str, control: str) -> Gains | None:
    """Return the gains in the loss on held-out text, over the seeds that both have; None where that is one."""
    base = results.base_loss
    losses = [results.methods[name].held_out_losses for name in (method, control)]
    seeds = losses[0].keys() & losses[1].keys()
    if base is None or len(seeds) < 2:
        return None
    m, c = ([base - each[seed] for seed in sorted(seeds)] for each in losses)
    t = float(scipy.special.stdtrit(len(seeds) - 1, 0.975))
    m_reach, c_reach = (t * math.sqrt(_covariance_of_means(each, each)) for each in (m, c))
    return Gains(fmean(m), fmean(c), m_reach, c_reach, t**2 * _covariance_of_means(m, c))


def _covariance_of_means(one: Sequence[float], other: Sequence[float]) -> float:
    n, one_mean, other_mean = len(one), fmean(one), fmean(other)
    return math.fsum((x - one_mean) * (y - other_mean) for x, y in zip(one, other, strict=True)) / (n - 1) / n


def _estimate(results: ComparisonResults, made: Comparison | None) -> tuple[float, float]:
    """Return a gain, larger is better, and the reach of its interval; of a perplexity those of its logarithm."""
    if made is None:
        return 0.0, 0.0
    info, values = results.tasks[made.task], results.values(made.reference, made.task, made.metric)
    ends = [made.difference, made.low, made.high]
    higher = info.higher_is_better if made.metric == info.primary else made.metric != BITS_PER_BYTE
    if values and made.metric != BITS_PER_BYTE and scale_of(made.metric, info.higher_is_better) is Scale.RELATIVE:
        ends = [math.log1p(end / fmean(values)) if end > -fmean(values) else -math.inf for end in ends]
    value, low, high = ends
    return (value if higher else -value), (high - low) / 2


def _finding(results: ComparisonResults, name: str, controls: Sequence[Control]) -> Finding:
    """Say in one sentence which part of a method carries its effect, or that this is not known."""
    for measure in measures(results):
        shares = {each: share(results, name, each.name, measure) for each in controls}
        known = {each: found for each, found in shares.items() if found is not None}
        if known:
            known = dict(sorted(known.items(), key=lambda pair: -pair[1].value))
            parts = [f"{each.keeps} ({each.name}) reaches {found}" for each, found in known.items()]
            conclusion, tone = _conclusion(known)
            conclusion = f"{conclusion[0].upper()}{conclusion[1:]}"
            return Finding(name, f"gains on {measure}; of that, {listed(parts)}. {conclusion}.", tone)
    why = f"has no significant gain over {results.baseline} by these measures that its controls have too"
    return Finding(name, f"{why}, so which part carries it cannot be told.", "unknown")


def _conclusion(shares: Mapping[Control, Share]) -> tuple[str, Tone]:
    most = [(each.keeps, found) for each, found in shares.items() if found.low > _HALF]
    if len(most) == 1:
        return f"{most[0][0]} carries most of the effect", "better"
    if most:
        first, second = most[:2]
        more = f"; {first[0]} the most" if first[1].low > second[1].high else ""
        return f"{listed([keeps for keeps, _ in most])} each reach most of the effect by themselves{more}", "better"
    if all(found.high < _HALF for found in shares.values()):
        return "none of these alone carries half of the effect", "mixed"
    return "whether a part alone carries most of the effect cannot be told", "unknown"


def _table(results: ComparisonResults, groups: Mapping[str, Sequence[Control]]) -> Table:
    shown = measures(results)
    notes = [(metric_text(each.metric),) for each in shown]
    columns = [Column("method"), Column("what it keeps"), Column("trainable", number=True)]
    columns += [Column(each.task or UNTESTED, note, number=True) for each, note in zip(shown, notes, strict=True)]
    rows = []
    for name, controls in groups.items():
        cells = [_whole(results, name, measure) for measure in shown]
        rows.append(Row((name, "all", count(results.methods[name].trainable), *cells), strong=True))
        for each in controls:
            shares = [share(results, name, each.name, measure) for measure in shown]
            cells = [NOTHING if found is None else str(found) for found in shares]
            rows.append(Row((each.name, each.keeps, count(results.methods[each.name].trainable), *cells)))
    return Table("shares", "Methods and their controls", tuple(columns), tuple(rows), caption=_CAPTION, heading=False)


def _whole(results: ComparisonResults, name: str, measure: Measure) -> str:
    """Return a method's own difference to the baseline."""
    if measure.task:
        made = results.comparison(name, measure.task, results.baseline, measure.metric)
        return NOTHING if made is None else change_text(change_of(results, made))
    base, losses = results.base_loss, results.methods[name].held_out_losses
    if base is None or not losses:
        return NOTHING
    return significant(fmean(losses.values()) - base, 3)
