"""Methods by budget: the figure and the table of a comparison with budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hfpatch.recipes.budgets import budget_in
from hfpatch.reporting import document as doc
from hfpatch.reporting import plots
from hfpatch.reporting.comparison.forest import EXPLORATORY, FOOTNOTES, TRIED
from hfpatch.reporting.numbers import (
    NOTHING,
    Change,
    digits_for,
    gain_on,
    scale_in,
    short_count,
    signed,
    task_text,
    times_text,
    unit_text,
)
from hfpatch.reporting.theme import INK, MUTED, Style, report_style, short, styles
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.frontier import Exchange, Frontier, FrontierLine
from hfpatch.results.tables import Record
from hfpatch.results.verdicts import Verdict


def against_reference(results: ComparisonResults, frontier: Frontier, line: FrontierLine) -> dict[str, Verdict]:
    """Return the verdict of each budget of a method against the reference of the same budget, by the method's point."""
    others = [point for other in frontier.lines if other.method == frontier.reference for point in other.points]
    tested: dict[str, Verdict] = {}
    for point, other in product(line.points, others):
        verdict = results.verdict(point, frontier.task, other)
        if verdict is not None and verdict.tone != "not tested":
            tested.setdefault(point, verdict)
    return tested


def budget_table(results: ComparisonResults, frontier: Frontier) -> doc.Table:
    """Build the table of gains by budget, with their outcomes against the reference, and parameters for equal gain."""
    against = {line.method: against_reference(results, frontier, line) for line in frontier.lines}
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
                marks = EXPLORATORY * (tested[point].role != "primary") + TRIED * bool(tested[point].at_rates_tried)
                cells.append(doc.Cell((f"{text}{marks}",), tested[point].tone))
            else:
                cells.append(text)
        equal = line.exchange
        if line.method == frontier.reference:
            cells.append("1")
        elif equal is None:
            cells.append(NOTHING)
        elif equal.rate is None:
            ends = {"more than": equal.more_than, "less than": equal.less_than}
            bounds = " and ".join(f"{words} {times_text(end)}" for words, end in ends.items() if end is not None)
            cells.append(f"{bounds or 'cannot be told'} ({equal.why})")
        else:
            cells.append(f"{times_text(equal.rate)} [{times_text(equal.low)}, {times_text(equal.high)}]")
        table.append(doc.Row(tuple(cells)))
    task, unit = task_text(frontier.task), unit_text(frontier.metric, scale_in(results, frontier.task, frontier.metric))
    caption = f"Gains over the base on {task}, in {unit}."
    if (name := frontier.reference) is not None:
        tones = {verdict.tone for tested in against.values() for verdict in tested.values()}
        marks = ", ".join(f"{mark} {doc.WORDS.get(tone, tone)}" for tone, mark in doc.MARKS.items() if tone in tones)
        caption += f" Against {name} of that budget, corrected over the question: {marks}." if marks else ""
        caption += (
            f" For equal gain: how many times {name}'s parameters a method needs, with the plain 95 % interval of this "
            "rate (docs/frontiers.md)."
        )
    title = "Gain by budget"
    return doc.Table("budgets", title, tuple(columns), tuple(table), caption, heading=False, footnotes=FOOTNOTES)


def _budgets(results: ComparisonResults, frontier: Frontier) -> dict[str, int]:
    """Return the parameters of each budget, ascending."""
    sizes: dict[str, int] = {}
    for point in (point for line in frontier.lines for point in line.points):
        match = results.methods[point].match
        if budget_in(point) and match is not None:
            sizes[budget_in(point)] = match.target_parameters
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


def frontier_records(results: ComparisonResults) -> Iterator[Record]:
    """Yield the figure's data: each point's gain, in the figure's unit, and the exchange rate of its method."""
    frontier = results.frontier
    if frontier is None:
        return
    scale = scale_in(results, frontier.task, frontier.metric)
    measured = {"task": frontier.task, "metric": frontier.metric, "unit": unit_text(frontier.metric, scale)}
    for line in frontier.lines:
        rate = line.exchange or Exchange()
        for point in line.points:
            gain = gain_on(results, point, frontier.task, plain=True)
            row = {"method": line.method, "point": point, "trainable": results.methods[point].trainable, **measured}
            ends = (None,) * 3 if gain is None else (gain.difference, gain.low, gain.high)
            row |= dict(zip(("gain", "gain_low", "gain_high"), ends, strict=True))
            row |= {"rate": rate.rate, "rate_low": rate.low, "rate_high": rate.high}
            for end, level in (("lowest", rate.lowest), ("highest", rate.highest)):
                row[f"{end}_gain"] = None if gain is None or level is None else level * gain.factor
            yield row | {"why": rate.why, "more_than": rate.more_than, "less_than": rate.less_than}


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
