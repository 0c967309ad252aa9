"""Methods by budget: the figure, the sentences and the table of a comparison with budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hfpatch.errors import listed
from hfpatch.recipes.budgets import budget_in
from hfpatch.reporting import document as doc
from hfpatch.reporting import plots
from hfpatch.reporting.comparison.answer import tone_of
from hfpatch.reporting.comparison.forest import AT_RATES_TRIED, TRIED
from hfpatch.reporting.numbers import (
    NOTHING,
    Change,
    digits_for,
    gain_on,
    scale_in,
    short_count,
    signed,
    task_text,
    unit_text,
)
from hfpatch.reporting.tabular import csv_text
from hfpatch.reporting.theme import INK, MUTED, Style, report_style, short, styles
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.frontier import Exchange, Frontier, FrontierLine, times_text
from hfpatch.results.verdicts import Verdict

_BOUNDS = ("why", "more_than", "less_than")
_READING = (
    "How many times {name}'s parameters a method needs for equal gain: the mean over all gains that both reach, "
    "with the 95 % interval of this rate alone. Ahead and behind at a budget are tested against the LoRA of that "
    "budget, corrected over its question.{exploratory} More in docs/frontiers.md."
)


def frontier_blocks(results: ComparisonResults) -> Iterator[doc.Block]:
    """Yield the sentences of a comparison with budgets; nothing without budgets."""
    frontier = results.frontier
    if frontier is None:
        return
    others = [line for line in frontier.lines if line.method != frontier.reference]
    tones = {line.method: tone_of([*against_reference(results, line).values()]) for line in others}
    yield doc.Findings(tuple(doc.Finding(e.method, sentence(results, e), tones[e.method]) for e in others))
    if frontier.reference is not None:
        tested = {line.method: against_reference(results, line).values() for line in others}
        secondary = [name for name, made in tested.items() if made and all(one.role != "primary" for one in made)]
        exploratory = f" Exploratory: {listed(secondary)}." if secondary else ""
        yield doc.Text(_READING.format(name=frontier.reference, exploratory=exploratory), "caption")


def against_reference(results: ComparisonResults, line: FrontierLine) -> dict[str, Verdict]:
    """Return the verdict of each budget of a method against the reference of the same budget, by the method's point."""
    frontier = results.frontier
    reference = next((line for line in frontier.lines if line.method == frontier.reference), None) if frontier else None
    if frontier is None or reference is None:
        return {}
    tested: dict[str, Verdict] = {}
    for point in line.points:
        made = (results.verdict(point, frontier.task, other) for other in reference.points)
        verdict = next((verdict for verdict in made if verdict is not None and verdict.tone != "not tested"), None)
        tested |= {point: verdict} if verdict is not None else {}
    return tested


def sentence(results: ComparisonResults, line: FrontierLine) -> str:
    """Compare a method with the reference in one sentence, without its subject."""
    frontier, exchange = results.frontier, line.exchange
    if frontier is None or frontier.reference is None:
        return "is compared with no LoRA of several budgets"
    if line.method == frontier.reference:
        return "is what the others are compared with"
    name, clauses = frontier.reference, []
    if exchange is not None and exchange.rate is not None:
        low, high = (times_text(end) for end in (exchange.low, exchange.high))
        clauses.append(f"reaches {name}'s gain with {times_text(exchange.rate)} times its parameters [{low}, {high}]")
    if verdicts := against_reference(results, line):
        clauses.append(_where(results, name, verdicts, at_every=len(verdicts) == len(line.points) > 1))
        if tried := [budget_in(one.method) or budget_in(one.other) for one in verdicts.values() if one.at_rates_tried]:
            clauses[-1] += ", at the rates tried" + (f" at {listed(tried)}" if len(tried) < len(verdicts) else "")
    if exchange is not None and exchange.rate is None and exchange.bounds:
        clauses.append(f"needs {exchange.bounds} times {name}'s parameters for equal gain ({exchange.why})")
    elif exchange is not None and exchange.rate is None:
        clauses.append(f"its exchange rate cannot be told ({exchange.why})")
    return "; ".join(clauses) or f"is not compared with {name}"


def _where(results: ComparisonResults, name: str, verdicts: Mapping[str, Verdict], *, at_every: bool) -> str:
    """Say at which budgets a method is ahead of the reference, and at which behind; a method of one size at its LoRA's.

    ``at_every``: whether every budget of the method was tested.
    """
    budgets_by_tone: dict[str, list[str]] = {"better": [], "worse": [], "same": [], "undecided": []}
    for point, verdict in verdicts.items():
        budgets_by_tone[verdict.tone].append(budget_in(point) or budget_in(verdict.other))
    better, worse, same, undecided = budgets_by_tone.values()
    neither = [*same, *undecided]
    tested = "every budget" if at_every else listed([*better, *worse, *neither])
    if not better and not worse:
        if same and undecided:
            return f"is equivalent to {name} at {listed(same)}, undecided at {listed(undecided)}"
        return f"is {'equivalent to' if same else 'undecided against'} {name} at {tested}"
    if not neither and not (better and worse):
        return f"is {'ahead of' if better else 'behind'} {name} at {tested}"
    if better and worse and not neither and at_every:
        # Where the better one changes, to two digits, if it does so once: between two budgets the difference of the
        # gains is linear in the logarithm of the parameters
        sizes = [results.methods[point].trainable for point in verdicts]
        gains = [verdict.difference for verdict in verdicts.values()]
        crossed = [(one, two) for one, two in pairwise(zip(sizes, gains, strict=True)) if one[1] * two[1] < 0]
        if len(crossed) == 1:
            (size, gain), (larger, other_gain) = crossed[0]
            crossing = int(float(f"{size * (larger / size) ** (gain / (gain - other_gain)):.1e}"))
            first = next(iter(verdicts.values()))
            side, other = ("ahead of", "behind") if first.tone == "better" else ("behind", "ahead")
            return f"is {side} {name} below {crossing:,} parameters, {other} above"
    at = {f"ahead of {name}": better, f"behind {name}": worse, f"equivalent to {name}": same, "undecided": undecided}
    return f"is {listed([f'{words} at {listed(budgets)}' for words, budgets in at.items() if budgets])}"


def frontier_csv(results: ComparisonResults) -> str:
    """Return the figure's data: a row for each point, in the figure's unit, and its method's exchange rate."""
    headings = "method", "point", "parameters", "gain", "low", "high", "rate", "rate_low", "rate_high", *_BOUNDS
    rows: list[tuple[object, ...]] = []
    if (frontier := results.frontier) is None:
        return csv_text(headings, rows)
    for line in frontier.lines:
        rate = line.exchange or Exchange()
        for point in line.points:
            gain, size = gain_on(results, point, frontier.task, plain=True), results.methods[point].trainable
            ends = (None,) * 3 if gain is None else (gain.difference, gain.low, gain.high)
            bounds = (getattr(rate, name) for name in _BOUNDS)
            rows.append((line.method, point, size, *ends, rate.rate, rate.low, rate.high, *bounds))
    return csv_text(headings, rows)


def budget_table(results: ComparisonResults) -> doc.Table:
    """Build the table of gains by budget, with their outcomes against the reference, and of parameters for equal gain.

    Raises:
        ValueError: if the results have no budgets.
    """
    frontier = results.frontier
    if frontier is None:
        raise ValueError("the results have no budgets")
    against = {line.method: against_reference(results, line) for line in frontier.lines}
    budgets = list(_budgets(results, frontier))
    alone = any(not budget_in(line.points[0]) for line in frontier.lines)
    columns = [doc.Column("method"), *(doc.Column(budget, number=True) for budget in budgets)]
    columns += [doc.Column("its one size", number=True)] if alone else []
    columns += [doc.Column("for equal gain", (f"× {frontier.reference}",), number=True)]
    table = []
    for line in frontier.lines:
        points, tested = {budget_in(point): point for point in line.points}, against[line.method]
        cells: list[str | doc.Cell] = [line.method]
        for budget in (*budgets, *([""] * alone)):
            point = points.get(budget, "")
            gain = gain_on(results, point, frontier.task, plain=True) if point else None
            text = NOTHING if gain is None else signed(gain.difference, digits_for(gain))
            if gain is not None and not budget:
                text += f" ({short_count(results.methods[line.points[0]].trainable)})"
            if point in tested:
                mark = f" {TRIED}" * bool(tested[point].at_rates_tried)
                cells.append(doc.Cell((f"{text}{mark}",), tested[point].tone))
            else:
                cells.append(text)
        equal = line.exchange
        if line.method == frontier.reference:
            cells.append("1")
        elif equal is None or equal.rate is None:
            cells.append(NOTHING if equal is None else equal.bounds or "cannot be told")
        else:
            cells.append(f"{times_text(equal.rate)} [{times_text(equal.low)}, {times_text(equal.high)}]")
        table.append(doc.Row(tuple(cells)))
    task, unit = task_text(frontier.task), unit_text(frontier.metric, scale_in(results, frontier.task, frontier.metric))
    caption = f"Gains over the base on {task}, in {unit}."
    if (name := frontier.reference) is not None:
        caption += f" Marks: against {name} of that budget. For equal gain: times the parameters of {name} [95 %]."
    made = doc.Table("budgets", "Gain by budget", tuple(columns), tuple(table), heading=False)
    return replace(made, caption=" ".join([caption, *made.notes(AT_RATES_TRIED)]))


def _budgets(results: ComparisonResults, frontier: Frontier) -> dict[str, int]:
    """Return the parameters of each budget, ascending."""
    sizes: dict[str, int] = {}
    for point in (point for line in frontier.lines for point in line.points):
        match = results.methods[point].match
        if budget_in(point) and match is not None:
            sizes[budget_in(point)] = match.target_parameters
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


@report_style()
def frontier_figure(results: ComparisonResults) -> Figure | None:
    """Draw the gain over the logarithm of the parameters, a line a method; None without budgets."""
    frontier = results.frontier
    if frontier is None:
        return None
    drawn: dict[str, list[tuple[int, Change]]] = {}  # the parameters and the gain of each point
    for line in frontier.lines:
        for point in line.points:
            gain, size = gain_on(results, point, frontier.task, plain=True), results.methods[point].trainable
            if gain is not None and size:
                drawn.setdefault(line.method, []).append((size, gain))
    if not drawn:
        return None
    others = [line.method for line in frontier.lines if line.method != frontier.reference]
    looks = {name: look for name, look in styles(others, None).items() if name in drawn}
    if frontier.reference in drawn:
        looks = {frontier.reference: Style(INK, "o", "-"), **looks}
    figure, (ax,) = plots.panels(1, columns=1, width=8.8, height=4.0, key=len(looks))
    for name, look in looks.items():
        sizes, gains = [size for size, _ in drawn[name]], [gain for _, gain in drawn[name]]
        middle, low, high = ([getattr(one, end) for one in gains] for end in ("difference", "low", "high"))
        bounded = all(map(math.isfinite, (*low, *high)))
        of_reference = name == frontier.reference
        if bounded and len(sizes) == 1:
            ax.vlines(sizes, low, high, color=look.colour, linewidth=1.2)
        elif bounded:
            ax.fill_between(sizes, low, high, color=look.colour, alpha=0.14 if of_reference else 0.1, linewidth=0)
        width = 2.2 if of_reference else 1.5
        ax.plot(sizes, middle, look.marker, color=look.colour, linestyle=look.dash, linewidth=width, markersize=5)
    gains = [gain for points in drawn.values() for _, gain in points]
    middles = [0.0, *(gain.difference for gain in gains)]
    ends = [end for gain in gains for end in (gain.low, gain.high) if math.isfinite(end)]
    reach = 0.35 * (max(middles) - min(middles)) or 1.0  # bands of few seeds may reach much further
    ax.set_ylim(
        max(min(*middles, *ends), min(middles) - reach) - reach / 8,
        min(max(*middles, *ends), max(middles) + reach) + reach / 8,
    )
    ax.axhline(0, color=MUTED, linewidth=0.8)
    ax.set(xscale="log", xlabel="trainable parameters")
    budgets = _budgets(results, frontier)
    ax.set_xticks(list(budgets.values()), list(budgets))
    ax.xaxis.set_minor_locator(NullLocator())
    unit = unit_text(frontier.metric, scale_in(results, frontier.task, frontier.metric))
    ax.set(title=short(task_text(frontier.task), 40), ylabel=f"gain in {unit}   ↑ better")
    plots.method_key(figure, looks)
    return figure
