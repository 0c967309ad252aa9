"""The figures of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from hfpatch.recipes.pairs import is_lora
from hfpatch.recipes.retention import text_of
from hfpatch.reporting import document as doc
from hfpatch.reporting import plots
from hfpatch.reporting.comparison.forest import forest_figure
from hfpatch.reporting.comparison.frontier import frontier_figure, frontier_records
from hfpatch.reporting.comparison.study import DIAGNOSTICS, diagnostics
from hfpatch.reporting.comparison.tuning import tuning_figure
from hfpatch.reporting.numbers import MOST_METHODS
from hfpatch.reporting.tabular import csv_text
from hfpatch.reporting.theme import GREY, INK, MUTED, PAPER, report_style, short, styles, to_svg
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.retention import KL, RetentionPoint, front
from hfpatch.results.series import QUANTITIES
from hfpatch.results.tables import Record

_Ends = tuple[float, float, float]  # a value, and the ends of its interval
_MOST_GROUPS = 3  # of more series of one method in a panel, the mean is drawn


class Drawing(NamedTuple):
    """A figure of a comparison: its title, how to read it, what draws it, and its data or their table in `records`.

    ``of_study`` says how to read that of a study with a held-out loss, ``of_one`` a single curve, where they are not to
    be read alike.
    """

    title: str
    caption: str
    draw: Callable[[ComparisonResults], Figure | None]
    data: str | Callable[[ComparisonResults], Iterable[Record]]
    draws_all: bool = False
    of_study: str = ""
    of_one: str = ""


@report_style()
def draw(results: ComparisonResults) -> dict[str, Figure]:
    """Return the figures that can be drawn, by name."""
    shown = prominent(results)
    drawn = {name: figure.draw(results if figure.draws_all else shown) for name, figure in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def figure_block(name: str, figure: Figure, results: ComparisonResults) -> doc.Figure:
    """Return a figure with its words and its data."""
    drawing, others = FIGURES[name], len(results.others)
    curves = [method.curve for method in results.methods.values() if method.curve is not None]
    improved = results.study is not None and any(curve.held_out for curve in curves)
    special = drawing.of_one if len(curves) == 1 else drawing.of_study if improved else ""
    caption = special or drawing.caption
    if others > MOST_METHODS and not drawing.draws_all:
        caption += (
            f" Drawn are the {MOST_METHODS} of {others} methods with the smallest p against the baseline; the tables "
            "and the data have all."
        )
    rows = results.records(drawing.data) if isinstance(drawing.data, str) else drawing.data(results)
    return doc.Figure(name, drawing.title, caption, to_svg(figure), csv_text(rows))


def prominent(results: ComparisonResults) -> ComparisonResults:
    """Return the results with at most :data:`MOST_METHODS` methods beside the baseline, for figures to show.

    Those with the smallest p of a difference to the baseline over the tasks stay.
    """
    if len(results.others) <= MOST_METHODS:
        return results
    smallest: dict[str, float] = {}
    for verdict in results.against_baseline:
        if verdict.p is not None:
            smallest[verdict.method] = min(verdict.p, smallest.get(verdict.method, 1.0))
    kept = {results.baseline, *sorted(results.others, key=lambda name: smallest.get(name, 1.0))[:MOST_METHODS]}
    return results.model_copy(update={"methods": {name: m for name, m in results.methods.items() if name in kept}})


def retention(results: ComparisonResults) -> Figure | None:
    """Draw the gain on held-out text against KL on each text that should be kept; None where one is not known."""
    kept = results.retention
    points = [point for point in kept.points if point.method in results.methods] if kept is not None else []
    panels: dict[str, list[tuple[RetentionPoint, _Ends, _Ends]]] = {}  # a point, its KL and its gain
    for task in kept.texts if kept is not None else ():
        for point in points:
            kl, gain = point.comparison(task, KL), results.gain_at(point)
            if kl is not None and gain is not None and np.isfinite([kl.difference, gain.difference]).all():
                ends = (-gain.difference, -gain.high, -gain.low)
                panels.setdefault(task, []).append((point, (kl.difference, kl.low, kl.high), ends))
    if kept is None or not panels:
        return None
    shown = dict.fromkeys(point.method for measured in panels.values() for point, _, _ in measured)
    looks = styles(list(results.methods), results.baseline, shown)
    figure, axes = plots.panels(len(panels), columns=2, width=6.2, height=4.0, key=len(looks))
    for (task, measured), ax in zip(panels.items(), axes, strict=True):
        ax.axhline(0, color=MUTED, linewidth=1.0, zorder=1)
        ax.plot(0, 0, "s", color=GREY, markersize=6, zorder=4)
        ax.annotate("base", (0, 0), (6, -11), "data", "offset points", color=MUTED)
        best = front([(0.0, 0.0), *((x[0], y[0]) for _, x, y in measured)])
        ax.step(*zip(*best, strict=True), where="post", color=GREY, linewidth=5, alpha=0.35, zorder=1)
        for name, look in looks.items():
            path_points = [(point, x, y) for point, x, y in measured if point.method == name]
            path = [(0.0, 0.0), *((x[0], y[0]) for _, x, y in path_points)]
            if len(path_points) > 1:
                ax.plot(*zip(*path, strict=True), color=look.colour, linestyle=look.dash, linewidth=1.2, zorder=2)
            for point, x, y in path_points:
                # how far each interval reaches below and above; nothing where it is unbounded
                across, up = (
                    [[value - low], [high - value]] if np.isfinite([low, high]).all() else [[0.0], [0.0]]
                    for value, low, high in (x, y)
                )
                bars: dict[str, Any] = {"xerr": across, "yerr": up, "color": look.colour}
                ax.errorbar(x[0], y[0], **bars, linewidth=1.0, alpha=1.0 if point.scale == 1 else 0.45, zorder=3)
                size = 8.5 if point.scale == 1 else 4.5
                ax.plot(x[0], y[0], look.marker, color=look.colour, markersize=size, markeredgecolor=PAPER, zorder=4)
                if len(path_points) > 1 and kept.chosen(name) == point.scale:
                    ax.plot(x[0], y[0], "o", color=INK, markerfacecolor="none", markersize=13, zorder=5)
        ax.set(title=short(text_of(task), 40), xlabel="KL(base ‖ method), nats per token   ← keeps more")
        ax.set_ylabel("gain on held-out text, nats per token   ↑ better")
    plots.method_key(figure, looks, points=True)
    return figure


def training(results: ComparisonResults) -> Figure | None:
    """Draw the training loss and its difference to a reference method's; None where there is no curve.

    All methods see the same batches, so the noise of the batches cancels in the difference. The reference is the
    first LoRA, or the first method.
    """
    curves = {name: method.curve for name, method in results.methods.items() if method.curve is not None}
    if not curves:
        return None
    looks = styles(list(results.methods), results.baseline, curves)
    reference = next((name for name in curves if is_lora(results.methods[name].parts)), next(iter(curves)))
    held_out = any(curve.held_out for curve in curves.values())
    of_study = held_out and results.study is not None
    count = 1 + (len(curves) > 1) + held_out
    figure, axes = plots.panels(count, columns=3, width=11.0 / max(2, count), height=2.8, key=len(looks))
    base, sizes, shares = curves[reference], list[float](), list[float]()
    for index, (name, look) in enumerate(looks.items()):
        curve = curves[name]
        plots.line(axes[0], curve.steps, plots.smooth(curve.loss), look, index)
        if len(curves) > 1 and of_study:  # in the place of the difference
            better = {step: 100 * share for step, share in results.improvements(name).items()}
            plots.line(axes[1], list(better), list(better.values()), look, index)
            shares += map(abs, better.values())
        elif len(curves) > 1:
            steps, here, there = np.intersect1d(curve.steps, base.steps, return_indices=True)
            difference = plots.smooth(np.array(curve.loss)[here] - np.array(base.loss)[there])
            plots.line(axes[1], steps, difference, look, index)
            sizes.append(np.abs(difference[np.isfinite(difference)]).max(initial=0.0))
        if held_out:
            plots.line(axes[-1], list(curve.held_out), list(curve.held_out.values()), look, index)
    axes[0].set(title="Training loss", ylabel="loss, nats per token")
    if of_study and len(curves) > 1:
        axes[1].set(
            title=f"Improvement over {short(str(results.baseline))}", ylabel="% of its held-out loss   ↑ better"
        )
        limit = 1.12 * plots.robust_limit(shares, 4.0)
        axes[1].set_ylim(-limit, limit)
    elif len(curves) > 1:
        axes[1].set(title=f"Loss less that of {short(reference)}", ylabel="nats per token   ↓ better")
        if any(sizes):
            limit = 1.1 * plots.robust_limit(sizes)
            axes[1].set_ylim(-limit, limit)
    if held_out:
        axes[-1].set(title="Loss on held-out text", ylabel="nats per token   ↓ better")
    for ax in axes:
        plots.integer_axis(ax, "step", 6)
    plots.method_key(figure, looks)
    return figure


def layer_panels(results: ComparisonResults) -> Figure | None:
    """Draw every quantity against the layer, one line per method; None where nothing is known layer by layer."""
    shown = [(name, series) for name, method in results.methods.items() for series in method.layers if series.points]
    order = list(QUANTITIES.values())
    quantities = sorted(
        dict.fromkeys(series.quantity for _, series in shown),
        key=lambda quantity: order.index(quantity) if quantity in order else len(order),
    )
    if not quantities:
        return None
    looks = styles(list(results.methods), results.baseline, {name for name, _ in shown})
    width = 11.0 / min(3, len(quantities))
    figure, axes = plots.panels(len(quantities), columns=3, width=width, height=2.6, key=len(looks))
    for quantity, ax in zip(quantities, axes, strict=True):
        here = [(name, series) for name, series in shown if series.quantity == quantity]
        for method in dict.fromkeys(name for name, _ in here):
            lines, look = [series.points for name, series in here if name == method], looks[method]
            if len(lines) > _MOST_GROUPS:  # the mean at each layer
                by_layer = {layer: [line[layer] for line in lines if layer in line] for line in lines for layer in line}
                lines = [{layer: float(np.mean(values)) for layer, values in by_layer.items()}]
            for points in lines:
                xs = sorted(points)
                ys = [points[layer] for layer in xs]
                ax.plot(xs, ys, look.marker, color=look.colour, linestyle=look.dash, linewidth=1.5, markersize=4.5)
        for reference in {series.reference for _, series in here if series.reference is not None}:
            ax.axhline(reference, color=MUTED, linewidth=1.0, linestyle=(0, (1, 1.5)))
            anchor = (1.0, reference), (0, 3), ax.get_yaxis_transform(), "offset points"
            ax.annotate("the paper's init", *anchor, ha="right")
        low, high = min(0.0, ax.get_ylim()[0]), max(0.0, ax.get_ylim()[1])
        ax.set_ylim(low, high + 0.06 * (high - low))
        if low < 0:
            ax.axhline(0, color=MUTED, linewidth=0.8)
        ax.set_title(short(quantity, 44))
        plots.integer_axis(ax, "layer", 8)
    plots.method_key(figure, looks)
    return figure


FIGURES = {
    "frontier": Drawing(
        "Gain against parameters",
        "The gain over the base against trainable parameters, one line per method; bands are plain 95 % intervals over "
        "seeds and documents. Black is the LoRA of the exchange rates. A method of one size is a mark.",
        frontier_figure,
        frontier_records,
        draws_all=True,
    ),
    "tuning": Drawing(
        "Held-out loss against learning rate",
        "The loss on the tuning text, in nats per token, after a trial at each learning rate; of several trials at one "
        "rate the lowest. The ringed mark is the choice. A mark at the upper edge lies above the panel; a cross "
        "diverged.",
        tuning_figure,
        "trials",
    ),
    "differences": Drawing(
        "Differences of the first question",
        "Thin lines are the intervals of the outcomes, corrected for all pairs of the question; thick ones are those "
        "of each difference alone (95 %). The band is the margin.",
        forest_figure,
        "verdicts",
        draws_all=True,
    ),
    "retention": Drawing(
        "Learning against forgetting",
        "To the right more is forgotten, upwards more is learned: the gain on held-out text against KL(base ‖ method) "
        "on text that should be kept, both with plain 95 % intervals. Small marks are a method's patch at the scales "
        "of rewind; the ring is the one that the text of tuning chooses. Nothing measured lies above and to the left "
        "of the grey front.",
        retention,
        "retention",
    ),
    "training": Drawing(
        "Training curves",
        "The training loss, mean over seeds, as a running mean; and the same minus that of one method. All methods see "
        "the same batches, so the noise of the batches cancels there. Where the loss on held-out text was measured, it "
        "has a panel of its own.",
        training,
        "curves",
        of_study="The training loss, mean over seeds, as a running mean; the loss on held-out text; and, between them, "
        "the share of the baseline's that is saved.",
        of_one="The training loss, mean over seeds, as a running mean. Where the loss on held-out text was measured, "
        "it has a panel of its own.",
    ),
    "diagnostics": Drawing(
        "Size and direction of f",
        DIAGNOSTICS,
        diagnostics,
        "diagnostics",
    ),
    "layers": Drawing(
        "Layer by layer",
        "Layer by layer, the mean over seeds. Norms are Frobenius norms of the saved patch; of "
        "several series of one method in a panel, such as heads, the mean is drawn.",
        layer_panels,
        "layers",
    ),
}
"""In the order of drawing."""
