"""Which part of a method carries its effect: each method beside the controls that keep one part of it alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from hfpatch.errors import listed
from hfpatch.recipes.pairs import controls_of
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.reporting.document import Column, Finding, Findings, Row, Section, Table, Text, Tone
from hfpatch.reporting.numbers import NOTHING, Scale, metric_text, outcome_of, scale_of, share_text, verdict_text
from hfpatch.results.comparison import ComparisonResults

_HALF = 0.5
_CAPTION = (
    "The first line of a group is the verdict on the method against the baseline; below it, the share of its gain that "
    "each of its controls reaches, with a plain 95 % interval (Fieller's; of a perplexity, from its logarithm), where "
    "the method is better. Each part was trained without the others, so shares need not add up."
)
_RULE = (
    "The sentence is about the first task, from the left of the table, on which the method is better. A part carries "
    "most of the effect where the whole interval of its share is above 50 %. All of it is exploratory."
)


@dataclass(frozen=True)
class Share:
    """The share of a method's gain that a control reaches, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return share_text(self.value, self.low, self.high)


def fieller(method: float, control: float, method_reach: float, control_reach: float, product: float) -> Share | None:
    """Return control / method with Fieller's interval: all r whose c - r m is not beyond its own 95 % reach.

    Args:
        method: the gain of the method over the baseline.
        control: the gain of its control.
        method_reach: half the length of the gain's 95 % interval: a quantile times its standard error.
        control_reach: the same of the control.
        product: the quantile squared times the covariance of the gains.

    Returns:
        The share; None where the interval is not bounded, as the method's gain may be 0, or the gain is a loss.
    """
    a = method**2 - method_reach**2
    b = method * control - product
    c = control**2 - control_reach**2
    if not (a > 0 and method > 0 and math.isfinite(b) and math.isfinite(c)):
        return None
    root = math.sqrt(max(0.0, b * b - a * c))
    return Share(control / method, (b - root) / a, (b + root) / a)


def attribution(results: ComparisonResults) -> Iterator[Section]:
    """Yield a section with every method that has controls; nothing where none has, or nothing was compared."""
    groups = controls_of({name: method.parts for name, method in results.methods.items()})
    if not groups or not results.comparisons:
        return
    # the tasks that score text first: the held-out text, other text, then the others
    tasks = sorted(results.tasks, key=lambda task: (task != HELD_OUT, not results.tasks[task].is_text))
    columns = [Column("method"), Column("what it keeps")]
    columns += [Column(task, (metric_text(results.deciding[task].metric),), number=True) for task in tasks]
    rows, findings = [], []
    for name, controls in groups.items():
        made = [results.verdict(name, task, results.baseline) for task in tasks]  # numbers: table of differences
        cells = [NOTHING if verdict is None else verdict_text(results, verdict) for verdict in made]
        rows.append(Row((name, "all", *cells), strong=True))
        shares_by_task: dict[str, list[tuple[str, Share]]] = {}
        for control, keeps in controls.items():
            shares = {task: share(results, name, control, task) for task in tasks}
            cells = [NOTHING if reached is None else str(reached) for reached in shares.values()]
            rows.append(Row((control, keeps, *cells)))
            for task, reached in shares.items():
                if reached is not None:
                    shares_by_task.setdefault(task, []).append((keeps, reached))
        # one sentence, of the first task on which a share is known
        where = next((task for task in tasks if task in shares_by_task), None)
        if where is None:
            why = f"is shown to be better than {results.baseline} on no task that its controls were tested on too"
            findings.append(Finding(name, f"{why}, so which part carries its effect cannot be told.", "not tested"))
            continue
        ranked = sorted(shares_by_task[where], key=lambda pair: -pair[1].value)
        most = [(keeps, reached) for keeps, reached in ranked if reached.low > _HALF]
        tone: Tone = "better" if most else "not tested"
        if len(most) == 1:
            conclusion = f"{most[0][0]} carries most of the effect"
        elif most:
            (first, largest), (_, second) = most[:2]
            more = f"; {first} the most" if largest.low > second.high else ""
            conclusion = f"{listed([keeps for keeps, _ in most])} each reach most of the effect by themselves{more}"
        elif all(reached.high < _HALF for _, reached in ranked):
            conclusion, tone = "none of these alone carries half of the effect", "mixed"
        else:
            conclusion = "whether a part alone carries most of the effect cannot be told"
        gained, measure = results.verdict(name, where, results.baseline), metric_text(results.deciding[where].metric)
        rates = outcome_of(gained).rates if gained is not None else ""
        findings.append(Finding(name, f"gains on {where} ({measure}){rates}; {conclusion}.", tone))
    title = "Methods and their controls"
    table = Table("shares", title, tuple(columns), tuple(rows), caption=_CAPTION, heading=False).with_values()
    blocks = (Findings(tuple(findings)), Text(_RULE, "caption"), table)
    yield Section("attribution", "Which part carries the effect", blocks, "Attribution")


def share(results: ComparisonResults, method: str, control: str, task: str) -> Share | None:
    """Return the share of a method's gain that a control reaches; None where the method is not better than the base.

    The reach of the difference between the two methods gives the product: reach(m - c)² = reach(m)² + reach(c)² -
    2 product. Where it is missing, the gains are taken as independent.
    """
    pairs = [(method, results.baseline), (control, results.baseline), (method, control)]
    made = [results.verdict(one, task, other) for one, other in pairs]
    if made[0] is None or made[1] is None or made[0].tone != "better":
        return None
    estimates = []  # a gain, larger is better, and the reach of its plain interval; of a perplexity of its logarithm
    for verdict in made:
        if verdict is None:
            estimates.append((0.0, 0.0))
            continue
        values = results.values(verdict.other, verdict.task, verdict.metric)
        ends = [verdict.difference, verdict.low, verdict.high]
        if values and scale_of(verdict.metric, verdict.higher_is_better) is Scale.RELATIVE:
            ends = [math.log1p(end / fmean(values)) if end > -fmean(values) else -math.inf for end in ends]
        estimates.append((ends[0] if verdict.higher_is_better else -ends[0], (ends[2] - ends[1]) / 2))
    (m, m_reach), (c, c_reach), (_, between) = estimates
    product = (m_reach**2 + c_reach**2 - between**2) / 2 if made[2] is not None else 0.0
    most = m_reach * c_reach
    return fieller(m, c, m_reach, c_reach, min(most, max(-most, product)))
