"""The report's figures, each a function from results to a matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from hfpatch.reporting.answer import control_for
from hfpatch.reporting.curves import Curve, Floats, smooth
from hfpatch.reporting.lines import LARGEST, draw_line, method_key, reach, step_axis
from hfpatch.reporting.numbers import NOTHING, Change, Scale, short_count, signed, significant
from hfpatch.reporting.results import Comparison, Results
from hfpatch.reporting.tables import scale_of_task, told_change
from hfpatch.reporting.theme import (
    BAND,
    BLUE,
    GREY,
    INK,
    MUTED,
    PAPER,
    VERMILLION,
    Style,
    panels,
    short,
    styles,
)

MARKS = {
    "better": (BLUE, "o", BLUE),
    "worse": (VERMILLION, "D", VERMILLION),
    "within noise": (GREY, "o", PAPER),
    "too few documents": (GREY, "x", GREY),
}
_COLUMNS = 4


MOST_METHODS = 24
"""How many methods a figure shows at most."""


def prominent(results: Results) -> Results:
    """Return the results with at most :data:`MOST_METHODS` methods beside the baseline, for figures to show.

    Those stay whose differences to the baseline are the surest, whichever way they go: the smallest p over the tasks.
    """
    others = [name for name in results.methods if name != results.baseline]
    if len(others) <= MOST_METHODS:
        return results
    surest: dict[str, float] = {}
    for each in results.comparisons:
        if each.reference == results.baseline and each.p is not None:
            surest[each.method] = min(each.p, surest.get(each.method, 1.0))
    kept = set(sorted(others, key=lambda name: surest.get(name, 1.0))[:MOST_METHODS])
    methods = {name: each for name, each in results.methods.items() if name in kept or name == results.baseline}
    return results.model_copy(update={"methods": methods})


def differences(results: Results, *, title: bool = False) -> Figure | None:
    """Draw the differences to the baseline with their intervals, a panel a task; None where none was made.

    To the right is always better, so the axis of a metric that should fall runs backwards. A row's grey bar spans
    the differences that would be invisible at this number of documents. With ``title`` the figure can stand alone.
    """
    baseline = results.baseline
    methods = [name for name in results.methods if name != baseline]
    tasks = [t for t in results.tasks if any(results.comparison(m, t, baseline) for m in methods)]
    methods = [m for m in methods if any(results.comparison(m, t, baseline) for t in tasks)]
    if not methods:
        return None
    columns = min(_COLUMNS, len(tasks))
    wide = 11.0 / columns if columns > 2 else 4.4
    height = (1.8 if title else 1.45) + 0.34 * len(methods)
    figure, axes = panels(len(tasks), columns=_COLUMNS, width=wide, height=height, share_y=True)
    for i, (task, ax) in enumerate(zip(tasks, axes, strict=True)):
        rows = [results.comparison(method, task, baseline) for method in methods]
        _forest(ax, results, task, rows)
        if i % columns == 0:
            ax.set_yticks(range(len(methods)), [short(method) for method in methods], color=INK)
            ax.set_ylim(len(methods) - 0.4, -0.6)
        if i % columns == columns - 1 or i == len(tasks) - 1:
            _parameter_column(ax, results, methods)
    if title:
        figure.suptitle(_summary_title(results), x=0.012, ha="left", fontsize=10.5, color=INK)
    figure.legend(
        handles=_forest_key(results), loc="outside lower center", ncols=4, handletextpad=0.5, columnspacing=1.8
    )
    return figure


def quality(results: Results) -> Figure | None:
    """Draw each task's metric against trainable parameters; None where no method has both."""
    tasks = [task for task in results.tasks if any(_points(results, task))]
    if not tasks:
        return None
    looks = styles(list(results.methods), results.baseline)
    columns = min(_COLUMNS, len(tasks))
    wide = 11.0 / columns if columns > 2 else 4.4
    figure, axes = panels(len(tasks), columns=_COLUMNS, width=wide, height=2.6, key=len(looks))
    for task, ax in zip(tasks, axes, strict=True):
        _scatter(ax, results, task, looks)
    shown = {method for task in tasks for method, *_ in _points(results, task)} | {results.baseline}
    method_key(figure, {name: look for name, look in looks.items() if name in shown}, line=False)
    return figure


def training(results: Results, curves: Mapping[str, Curve]) -> Figure | None:
    """Draw the training loss and its difference to a reference method's; None where there is no curve.

    All methods see the same batches, so the difference shows what the batches' own noise hides.
    """
    if not curves:
        return None
    looks = {name: look for name, look in styles(list(results.methods), results.baseline).items() if name in curves}
    reference = _reference(results, list(curves))
    held_out = any(curve.held_out for curve in curves.values())
    count = 1 + (len(curves) > 1) + held_out
    figure, axes = panels(count, columns=3, width=11.0 / max(2, count), height=2.8, key=len(looks))
    _losses(axes[0], curves, looks)
    if len(curves) > 1:
        _loss_differences(axes[1], curves, looks, reference)
    if held_out:
        _held_out(axes[-1], curves, looks)
    method_key(figure, looks, line=True, marks=True)
    return figure


def _parameter_column(ax: Axes, results: Results, methods: Sequence[str]) -> None:
    """Write each row's trainable parameters to the right of a panel."""
    rows = ax.get_yaxis_transform()
    for y, method in enumerate(methods):
        trainable = results.methods[method].trainable
        text = NOTHING if trainable is None else short_count(trainable)
        ax.annotate(text, (1.0, y), (46, 0), rows, "offset points", ha="right", va="center", annotation_clip=False)
    ax.annotate("trained", (1.0, 1.0), (46, 6), "axes fraction", "offset points", ha="right", color=MUTED)


def _summary_title(results: Results) -> str:
    model = results.model.get("name") or "the base model"
    seeds = len(results.seeds)
    return f"What each method changes against the frozen {short(str(model), 40)} ({seeds} seed{'s' * (seeds != 1)})"


def _forest(ax: Axes, results: Results, task: str, rows: Sequence[Comparison | None]) -> None:
    told = [(y, c, told_change(results, c)) for y, c in enumerate(rows) if c is not None]
    limit = _limit([change for _, _, change in told])
    info = results.tasks[task]
    ax.set_xlim(*((-limit, limit) if info.higher_is_better else (limit, -limit)))
    known = [(y, change.smallest_visible) for y, _, change in told if change.smallest_visible is not None]
    seen = [(y, min(size, limit)) for y, size in known if not np.isnan(size)]
    ax.barh([y for y, _ in seen], [2 * r for _, r in seen], 0.62, [-r for _, r in seen], color=BAND, zorder=1)
    for verdict in MARKS:
        _intervals(ax, [(y, change) for y, comparison, change in told if comparison.verdict == verdict], verdict, limit)
    ax.axvline(0, color=MUTED, linewidth=1.0, zorder=2)
    ax.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    unit = {Scale.POINTS: "points", Scale.RELATIVE: "% of the baseline"}.get(told[0][2].scale, "difference")
    ax.set_title(short(task, 22))
    ax.set_xlabel(f"{short(info.primary)}, {unit}\nbetter →")


def _limit(changes: Sequence[Change]) -> float:
    """Return how far a panel reaches: to the farthest interval end, but not to that of an outlier."""
    sizes = [(abs(change.low), abs(change.high), abs(change.difference)) for change in changes]
    ends = [max((size for size in each if np.isfinite(size)), default=0.0) for each in sizes]
    known = [change.smallest_visible for change in changes if change.smallest_visible is not None]
    seen = [size for size in known if 0 < size < LARGEST]
    return 1.12 * max(reach(ends), float(np.median(seen)) if seen else 0.0)


def _intervals(ax: Axes, rows: Sequence[tuple[int, Change]], verdict: str, limit: float) -> None:
    """Draw the rows of one verdict; those outside the panel as arrows at its edge."""
    colour, marker, face = MARKS[verdict]
    inside = [(y, c) for y, c in rows if abs(c.difference) <= limit]
    for y, change in rows:
        if (y, change) not in inside:
            off_scale(ax, y, change, colour)
    ys = [y for y, _ in inside]
    ends = np.clip(np.nan_to_num([(c.low, c.high) for _, c in inside]).reshape(-1, 2), -limit, limit)
    ax.hlines(ys, ends[:, 0], ends[:, 1], color=colour, linewidth=1.8, zorder=3)
    ax.plot([c.difference for _, c in inside], ys, marker, color=colour, markerfacecolor=face, markersize=6.5, zorder=4)


def off_scale(ax: Axes, y: int, change: Change, colour: str) -> None:
    """Draw an arrow at the panel's edge, with the number that lies beyond it."""
    right = (change.difference > 0) != ax.xaxis_inverted()
    edge = 0.97 if right else 0.03
    place = ax.get_yaxis_transform()
    ax.plot(edge, y, marker=">" if right else "<", color=colour, markersize=6.5, zorder=4, transform=place)
    unit = " %" if change.scale is Scale.RELATIVE else ""
    offset, side = (-6, "right") if right else (6, "left")
    text = f"{signed(change.difference, 0)}{unit}"
    ax.annotate(text, (edge, y), (offset, 0), place, "offset points", ha=side, va="center", color=INK)


def _forest_key(results: Results) -> list[Line2D | Patch]:
    def mark(verdict: str) -> Line2D:
        colour, marker, face = MARKS[verdict]
        return Line2D([], [], color=colour, marker=marker, markerfacecolor=face, linewidth=1.8, label=verdict)

    untested = any(comparison.verdict == "too few documents" for comparison in results.comparisons)
    marks = [mark(verdict) for verdict in MARKS if untested or verdict != "too few documents"]
    return [*marks, Patch(color=BAND, label="too small to be seen at this n")]


def _points(results: Results, task: str) -> list[tuple[str, int, float, float]]:
    """Return method, trainable parameters, mean and spread over seeds of those methods that train something."""
    found = []
    for name, method in results.methods.items():
        values = [value for value in results.values(name, task) if abs(value) < LARGEST]
        if values and method.trainable:
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            found.append((name, method.trainable, float(np.mean(values)), spread))
    return found


def _scatter(ax: Axes, results: Results, task: str, looks: Mapping[str, Style]) -> None:
    info, factor = results.tasks[task], 100.0 if scale_of_task(results, task) is Scale.POINTS else 1.0
    points = [(name, size, factor * mean, factor * spread) for name, size, mean, spread in _points(results, task)]
    base = results.mean(results.baseline, task) if results.baseline else None
    known = base is not None and np.isfinite(base)
    centre = factor * base if base is not None and known else float(np.median([mean for *_, mean, _ in points]))
    extent = 1.25 * reach([abs(mean - centre) + spread for *_, mean, spread in points])
    if known:
        ax.axhline(centre, color=GREY, linewidth=1.4, zorder=2)
    for name, trainable, mean, spread in points:
        _point(ax, trainable, mean, spread, centre, extent, looks[name])
    ax.set_ylim(centre - extent, centre + extent)
    _parameter_axis(ax, [trainable for _, trainable, *_ in points])
    ax.set_title(short(task, 22))
    better = "↑ better" if info.higher_is_better else "↓ better"
    ax.set_ylabel(f"{short(info.primary)}{', %' if factor == 100.0 else ''}   {better}")


def _point(ax: Axes, x: int, mean: float, spread: float, centre: float, extent: float, look: Style) -> None:
    """Draw a method's mean and spread; one outside the panel stands at its edge with its number."""
    if abs(mean - centre) > extent:
        up = mean > centre
        y, offset = (0.95, -7) if up else (0.05, 7)
        place = ax.get_xaxis_transform()
        ax.plot(
            x,
            y,
            look.marker,
            color=look.colour,
            markeredgecolor=PAPER,
            markeredgewidth=0.6,
            markersize=8,
            transform=place,
            zorder=4,
        )
        text = f"{significant(mean, 3)} {'↑' if up else '↓'}"
        ax.annotate(text, (x, y), (0, offset), place, "offset points", ha="center", va="top" if up else "bottom")
        return
    ax.errorbar(x, mean, yerr=spread, color=look.colour, linewidth=1.2, zorder=3)
    ax.plot(x, mean, look.marker, color=look.colour, markeredgecolor=PAPER, markeredgewidth=0.6, markersize=8, zorder=4)


def _parameter_axis(ax: Axes, counts: Sequence[int]) -> None:
    if max(counts) > 20 * min(counts):
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlim(min(counts) / 2, max(counts) * 2)
    else:
        ax.set_xlim(0, 1.12 * max(counts))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    ax.set_xlabel("trainable parameters")


def _reference(results: Results, names: Sequence[str]) -> str:
    """Return the method whose curve the others are compared with: the LoRA if there is one, else the first."""
    controls = [control_for(results, results.methods[name]) for name in names if name in results.methods]
    return next((control.name for control in controls if control is not None and control.name in names), names[0])


def _losses(ax: Axes, curves: Mapping[str, Curve], looks: Mapping[str, Style]) -> None:
    for place, (name, look) in enumerate(looks.items()):
        curve = curves[name]
        draw_line(ax, curve.steps, _smoothed(curve.loss), look, place)
    ax.set_title("Training loss")
    step_axis(ax)
    ax.set_ylabel("loss, nats per token")


def _held_out(ax: Axes, curves: Mapping[str, Curve], looks: Mapping[str, Style]) -> None:
    for place, (name, look) in enumerate(looks.items()):
        points = curves[name].held_out
        draw_line(ax, np.array(list(points), dtype=np.int64), np.array(list(points.values())), look, place)
    ax.set_title("Loss on held-out text")
    step_axis(ax)
    ax.set_ylabel("nats per token   ↓ better")


def _loss_differences(ax: Axes, curves: Mapping[str, Curve], looks: Mapping[str, Style], reference: str) -> None:
    base, reaches = curves[reference], []
    for place, (name, look) in enumerate(looks.items()):
        steps, here, there = np.intersect1d(curves[name].steps, base.steps, return_indices=True)
        difference = _smoothed(curves[name].loss[here] - base.loss[there])
        draw_line(ax, steps, difference, look, place)
        finite = np.abs(difference[np.isfinite(difference)])
        reaches += [float(finite.max())] if finite.size and finite.max() > 0 else []
    if reaches:
        limit = 1.1 * reach(reaches)
        ax.set_ylim(-limit, limit)
    ax.set_title(f"Training loss less that of {short(reference)}")
    step_axis(ax)
    ax.set_ylabel("↓ better")


def _smoothed(values: Floats) -> Floats:
    return smooth(values, max(1, values.size // 25))
