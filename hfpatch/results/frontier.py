"""Methods at several budgets: which results are points of one frontier, and how it compares with LoRA's.

The exchange rate is computed with the results (:mod:`hfpatch.evaluation.exchange`); what is better or worse at a budget
is a verdict like all others. :func:`sentence` says both, and every report reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from pydantic import Field

from hfpatch.errors import listed
from hfpatch.recipes.budgets import budget_in
from hfpatch.results.parts import Measured, Part
from hfpatch.results.verdicts import Verdict

if TYPE_CHECKING:
    from hfpatch.results.comparison import ComparisonResults


class Exchange(Part):
    """How many times the reference's parameters a method needs for equal gain.

    Attributes:
        rate: the rate, the mean over the gains that both reach; None where it cannot be told.
        low, high: ends of its 95 % interval.
        lowest, highest: the range of the gains that it is the mean over, in the metric's unit.
        why: why it cannot be told.
        more_than, less_than: bounds of a rate that cannot be told; None without one.
    """

    rate: Measured = None
    low: Measured = None
    high: Measured = None
    lowest: Measured = None
    highest: Measured = None
    why: str = ""
    more_than: Measured = None
    less_than: Measured = None

    @property
    def bounds(self) -> str:
        """The bounds of a rate that cannot be told, in words: ``more than 46``; "" without any."""
        more = "" if self.more_than is None else f"more than {times_text(self.more_than)}"
        less = "" if self.less_than is None else f"less than {times_text(self.less_than)}"
        return " and ".join(filter(None, [more, less]))


class FrontierLine(Part):
    """One method.

    Attributes:
        method: the method without a budget.
        points: its budgets, the names of methods of the results, by the parameters that they train; or itself.
        exchange: its exchange rate over the reference; None for that itself, and where there is none.
    """

    method: str
    points: list[str]
    exchange: Exchange | None = None


class Frontier(Part):
    """All methods of a comparison with budgets.

    Attributes:
        task: what gains are measured on.
        metric: by which measure, the one that decides the task.
        reference: the LoRA that exchange rates are over; None where none has two budgets.
        lines: the methods that are trained.
    """

    task: str
    metric: str
    reference: str | None = None
    lines: list[FrontierLine] = Field(default_factory=list)


def against_reference(results: ComparisonResults, line: FrontierLine) -> dict[str, Verdict]:
    """Return the verdict of each budget of a method against the reference of the same budget, by the method's point."""
    frontier = results.frontier
    reference = next((each for each in frontier.lines if each.method == frontier.reference), None) if frontier else None
    if frontier is None or reference is None:
        return {}
    found: dict[str, Verdict] = {}
    for point in line.points:
        made = (results.verdict(point, frontier.task, other) for other in reference.points)
        known = [each for each in made if each is not None and each.tone != "not tested"]
        found |= {point: known[0]} if known else {}
    return found


def sentence(results: ComparisonResults, line: FrontierLine) -> str:
    """Compare a method with the reference in one sentence, without its subject."""
    frontier, exchange = results.frontier, line.exchange
    if frontier is None or frontier.reference is None:
        return "is compared with no LoRA of several budgets"
    if line.method == frontier.reference:
        return "is what the others are compared with"
    name, said = frontier.reference, []
    if exchange is not None and exchange.rate is not None:
        low, high = (times_text(end) for end in (exchange.low, exchange.high))
        said.append(f"reaches {name}'s gain with {times_text(exchange.rate)} times its parameters [{low}, {high}]")
    if verdicts := against_reference(results, line):
        said.append(_where(results, name, verdicts))
    if exchange is not None and exchange.rate is None and exchange.bounds:
        said.append(f"needs {exchange.bounds} times {name}'s parameters for equal gain ({exchange.why})")
    elif exchange is not None and exchange.rate is None:
        said.append(f"its exchange rate cannot be told ({exchange.why})")
    return "; ".join(said) or f"is not compared with {name}"


def _where(results: ComparisonResults, name: str, verdicts: Mapping[str, Verdict]) -> str:
    """Say at which budgets a method is ahead of the reference, and at which behind."""
    places: dict[str, list[str]] = {"better": [], "worse": [], "same": [], "undecided": []}
    for point, verdict in verdicts.items():
        places[verdict.tone].append(budget_in(point))
    better, worse, same, undecided = places.values()
    neither = [*same, *undecided]
    if not better and not worse:
        if same and undecided:
            return f"is equivalent to {name} at {listed(same)}, undecided at {listed(undecided)}"
        return f"is {'equivalent to' if same else 'undecided against'} {name} at every budget"
    if not neither and not (better and worse):
        return f"is {'ahead of' if better else 'behind'} {name} at every budget"
    if better and worse and not neither:
        # Where the better one changes, to two digits, if it does so once: between two budgets the difference of the
        # gains is linear in the logarithm of the parameters
        sizes = [results.methods[point].trainable for point in verdicts]
        gains = [each.difference for each in verdicts.values()]
        crossed = [(one, two) for one, two in pairwise(zip(sizes, gains, strict=True)) if one[1] * two[1] < 0]
        if len(crossed) == 1:
            (size, gain), (larger, other_gain) = crossed[0]
            crossing = int(float(f"{size * (larger / size) ** (gain / (gain - other_gain)):.1e}"))
            first = next(iter(verdicts.values()))
            side, other = ("ahead of", "behind") if first.tone == "better" else ("behind", "ahead")
            return f"is {side} {name} below {crossing:,} parameters, {other} above"
    said = {f"ahead of {name}": better, f"behind {name}": worse, f"equivalent to {name}": same, "undecided": undecided}
    return f"is {listed([f'{words} at {listed(budgets)}' for words, budgets in said.items() if budgets])}"


def times_text(value: float | None) -> str:
    """Format a ratio to two significant digits."""
    return "∞" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2g}"
