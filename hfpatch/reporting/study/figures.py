"""The figures of a study's report, each a function from results to a matplotlib figure, or None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from hfpatch.reporting.curves import Floats
from hfpatch.reporting.figures import MARKS, MOST_METHODS, off_scale
from hfpatch.reporting.lines import LARGEST, draw_line, method_key, step_axis
from hfpatch.reporting.numbers import Change, Scale
from hfpatch.reporting.study.answer import share, tone_of
from hfpatch.reporting.study.diagnostics import FSeries, series_of, spread_of
from hfpatch.reporting.study.results import AtStep, ByStep, Row, StudyResults
from hfpatch.reporting.study.words import seeds_text, share_cell
from hfpatch.reporting.theme import GREY, INK, MUTED, PAPER, Style, panels, report_style, shade, short, styles, to_svg

_MOST_F_PANELS = 24
_COLUMNS = 4
_OUTLIER = 20.0  # times the middle variant's improvement
_FAR = 1.5  # times the lowest loss of all
_WIDE = 10.0  # a spread that changes more than so many times is drawn on a logarithmic axis
_FEW_TICKS = 5  # on the steps of a narrow panel


def draw(study: StudyResults) -> dict[str, str]:
    """Return every figure that there is something for, as SVG documents by name, in the order of reading."""
    with report_style():
        drawn = {
            "differences": differences(study),
            "loss": losses(study),
            "improvement": improvements(study),
            "diagnostics": diagnostics(study),
            "spread": spreads(study),
        }
        return {name: to_svg(figure) for name, figure in drawn.items() if figure is not None}


def differences(study: StudyResults, *, title: bool = False) -> Figure | None:
    """Draw the improvements at the end with their intervals, a row a variant; with ``title`` it can stand alone."""
    rows = [row for row in _shown(study).values() if row.improvement is not None and row.variant != study.baseline]
    if not rows:
        return None
    height = (1.75 if title else 1.4) + 0.34 * len(rows)
    figure, (ax,) = panels(1, columns=1, width=7.4, height=height)
    limit = 1.12 * _limit([max(_sizes(study, row)) for row in rows])
    ax.set_xlim(-limit, limit)
    for y, row in enumerate(rows):
        _interval(ax, y, study, row, limit)
    ax.axvline(0, color=MUTED, linewidth=1.0, zorder=2)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_yticks(range(len(rows)), [short(row.variant) for row in rows], color=INK)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlabel(f"improvement over {short(study.baseline)}, % of its validation loss\nbetter →")
    _parameters(ax, study, rows)
    if title:
        words = f"Validation loss against {short(study.baseline)} ({seeds_text(len(study.seeds))})"
        figure.suptitle(words, x=0.012, ha="left", fontsize=10.5, color=INK)
    tones = list(dict.fromkeys(tone_of(row) for row in rows))
    figure.legend(handles=[_mark(tone) for tone in tones], loc="outside lower center", ncols=4, handletextpad=0.5)
    return figure


def losses(study: StudyResults) -> Figure | None:
    """Draw the validation loss by step, the whole and its second half; None where nothing was measured."""
    curves = {name: row for name, row in _shown(study).items() if row.curve}
    if not curves:
        return None
    looks = _looks(study, curves)
    last = max(row.curve[-1][0] for row in curves.values())
    late = {name: [point for point in row.curve if point[0] >= last / 2] for name, row in curves.items()}
    zoomed = sum(len(points) > 1 for points in late.values()) > 0
    figure, axes = panels(1 + zoomed, columns=2, width=5.5, height=3.1, key=len(looks))
    for place, (name, row) in enumerate(curves.items()):
        _banded(axes[0], row.curve, looks[name], place)
        _crosses(axes[0], study, row, looks[name])
        if zoomed and len(late[name]) > 1:
            _banded(axes[1], late[name], looks[name], place)
    for ax, title in zip(axes, ("Validation loss", "The second half, larger"), strict=False):
        ax.set_title(title)
        step_axis(ax)
        ax.set_ylabel("nats per token   ↓ better")
    if zoomed:
        _fit(axes[1], list(late.values()))
    method_key(figure, looks, line=True, marks=True)
    return figure


def improvements(study: StudyResults) -> Figure | None:
    """Draw the relative improvement by step: all variants, then each with its interval; None where there is none."""
    rows = {name: row for name, row in _shown(study).items() if row.improvement_by_step and name != study.baseline}
    if not rows:
        return None
    looks = _looks(study, rows)
    several = len(rows) > 1
    columns = min(_COLUMNS, len(rows) + several)
    size = {"width": 11.0 / columns if several else 7.4, "height": 2.7 if several else 3.1}
    figure, axes = panels(len(rows) + several, columns=columns, share_y=True, key=len(looks), **size)
    if several:
        axes[0].set_title("all, the means")
    for place, (name, row) in enumerate(rows.items()):
        points = _in_per_cent(row.improvement_by_step)
        if several:
            _line(axes[0], points, looks[name], place)
        _banded(axes[place + several], points, looks[name], place)
        axes[place + several].set_title(short(name, 30))
    for i, ax in enumerate(axes):
        ax.axhline(0, color=MUTED, linewidth=1.0, zorder=1)
        step_axis(ax, _FEW_TICKS)
        if i % columns == 0:
            ax.set_ylabel("improvement, %   ↑ better")
    limit = 1.12 * _limit([_usual_size(study, row) for row in rows.values()])
    axes[0].set_ylim(-limit, limit)
    method_key(figure, looks, line=True, marks=True)
    return figure


def diagnostics(study: StudyResults) -> Figure | None:
    """Draw the size of f and its cosine by step, a line a layer and two panels a variant; None without any."""
    shown = [series for series in series_of(study) if series.layers][: _MOST_F_PANELS // 2]
    if not shown:
        return None
    columns = _COLUMNS if len(shown) > 1 else 2
    figure, axes = panels(2 * len(shown), columns=columns, width=11.0 / columns, height=2.5)
    for i, series in enumerate(shown):
        name = short(series.variant if series.target == "query" else f"{series.variant}, {series.target}", 26)
        _layers(axes[2 * i], series, 1, f"{name}: ‖f‖/‖A‖")
        _layers(axes[2 * i + 1], series, 2, f"{name}: cos(f, A)")
        axes[2 * i].set_ylim(bottom=0)
        axes[2 * i + 1].axhline(0, color=MUTED, linewidth=0.8)
    layers = sorted({layer for series in shown for layer in series.layers})
    if len(layers) > 1:
        ends = [(layers[0], 0), (layers[-1], len(layers) - 1)]
        handles = [Line2D([], [], color=shade(i, len(layers)), label=f"layer {layer}") for layer, i in ends]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def spreads(study: StudyResults) -> Figure | None:
    """Draw the standard deviation over seeds of the validation loss by step; None with fewer than two seeds."""
    found = {name: spread_of(study, row) for name, row in _shown(study).items()}
    found = {name: points for name, points in found.items() if points}
    if not found:
        return None
    looks = _looks(study, found)
    figure, (ax,) = panels(1, columns=1, width=7.4, height=2.9, key=len(looks))
    for place, (name, points) in enumerate(found.items()):
        steps, heights = zip(*points, strict=True)
        draw_line(ax, np.array(steps, dtype=np.int64), np.array(heights), looks[name], place)
    values = [value for points in found.values() for _, value in points]
    if min(values) > 0 and max(values) > _WIDE * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_ylim(bottom=0)
    step_axis(ax)
    ax.set_ylabel("standard deviation, nats per token")
    method_key(figure, looks, line=True, marks=True)
    return figure


def _shown(study: StudyResults) -> dict[str, Row]:
    kept = {study.baseline, *study.others[:MOST_METHODS]}
    return {name: row for name, row in study.chosen.items() if name in kept}


def _looks(study: StudyResults, shown: Mapping[str, object]) -> dict[str, Style]:
    return {name: look for name, look in styles(list(study.variants), study.baseline).items() if name in shown}


def _sizes(study: StudyResults, row: Row) -> list[float]:
    """Return how far a row of the forest reaches, in per cent: mean, interval ends and single seeds."""
    improvement = row.improvement
    if improvement is None:
        return []
    ends = [end for end in (improvement.mean, improvement.low, improvement.high) if end is not None]
    return [abs(100 * end) for end in (*ends, *study.seed_values(row).values())]


def _usual_size(study: StudyResults, row: Row) -> float:
    """Return how far most of a variant's improvements by step reach, and all that is known of it at the end."""
    means = [abs(mean) for _, mean, *_ in _in_per_cent(row.improvement_by_step) if mean is not None]
    return max([float(np.quantile(means, 0.9)) if means else 0.0, *_sizes(study, row)])


def _limit(sizes: Sequence[float]) -> float:
    """Return how far a panel reaches: to the largest of the variants' sizes, but not to that of an outlier."""
    known = sorted(size for size in sizes if 0 < size < LARGEST)
    return min(known[-1], _OUTLIER * known[(len(known) - 1) // 2]) if known else 1.0


def _interval(ax: Axes, y: int, study: StudyResults, row: Row, limit: float) -> None:
    improvement = row.improvement
    if improvement is None:
        return
    colour, marker, face = MARKS.get(tone_of(row), (GREY, "o", PAPER))
    if improvement.low is not None and improvement.high is not None:
        low, high = np.clip([100 * improvement.low, 100 * improvement.high], -limit, limit)
        ax.hlines(y, low, high, color=colour, linewidth=1.8, zorder=3)
    seeds = [100 * value for value in study.seed_values(row).values()]
    if len(seeds) > 1:
        ax.plot(seeds, [y + 0.22] * len(seeds), "|", color=MUTED, markersize=5, zorder=3)
    mean = 100 * improvement.mean
    if abs(mean) > limit:
        off_scale(ax, y, Change(mean, mean, mean, None, Scale.RELATIVE), colour)
    else:
        ax.plot(mean, y, marker, color=colour, markerfacecolor=face, markersize=6.5, zorder=4)


def _mark(tone: str) -> Line2D:
    colour, marker, face = MARKS.get(tone, (GREY, "o", PAPER))
    words = "one seed" if tone == "unknown" else tone
    line = "none" if tone == "unknown" else "-"
    return Line2D([], [], color=colour, marker=marker, markerfacecolor=face, linewidth=1.8, linestyle=line, label=words)


def _parameters(ax: Axes, study: StudyResults, rows: Sequence[Row]) -> None:
    """Write to the right of the panel how many more parameters each row has than the baseline."""
    place = ax.get_yaxis_transform()
    for y, row in enumerate(rows):
        text = share_cell(share(study, row.variant))
        ax.annotate(text, (1.0, y), (64, 0), place, "offset points", ha="right", va="center", annotation_clip=False)
    ax.annotate("parameters", (1.0, 1.0), (64, 6), "axes fraction", "offset points", ha="right", color=MUTED)


def _columns(points: ByStep | Sequence[Sequence[float | None]]) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    """Return steps, means and both ends of a statistic by step; what is not known is not drawn."""
    steps = np.array([point[0] for point in points], dtype=np.int64)
    values = np.array([[np.nan if part is None else part for part in point[1:]] for point in points], dtype=np.float64)
    values[np.abs(values) > LARGEST] = np.nan
    mean, low, high = values.reshape(-1, 3).T
    return steps, mean, low, high


def _in_per_cent(points: ByStep) -> ByStep:
    def times(value: float | None) -> float | None:
        return None if value is None else 100 * value

    return tuple((step, times(mean), times(low), times(high)) for step, mean, low, high in points)


def _line(ax: Axes, points: ByStep, look: Style, place: int) -> None:
    steps, mean, _, _ = _columns(points)
    draw_line(ax, steps, mean, look, place)


def _banded(ax: Axes, points: Sequence[AtStep], look: Style, place: int) -> None:
    steps, mean, low, high = _columns(points)
    draw_line(ax, steps, mean, look, place)
    if np.isfinite(low).any():
        ax.fill_between(steps, low, high, color=look.colour, alpha=0.18, linewidth=0)


def _crosses(ax: Axes, study: StudyResults, row: Row, look: Style) -> None:
    for run in study.runs_of(row):
        known = [(step, loss) for step, loss in run.evaluation if loss is not None and abs(loss) < LARGEST]
        if run.outcome == "diverged" and known:
            ax.plot(*known[-1], "x", color=look.colour, markersize=7, markeredgewidth=2, zorder=5)


def _fit(ax: Axes, curves: Sequence[Sequence[AtStep]]) -> None:
    """Let a panel of losses reach as far as its lines do, but not to one that runs away."""
    known = [np.concatenate(_columns(points)[1:]) for points in curves if points]
    known = [values[np.isfinite(values)] for values in known]
    lowest = min((float(values.min()) for values in known if values.size), default=0.0)
    near = [values for values in known if values.size and float(values.min()) <= _FAR * lowest]
    highest = min(max((float(values.max()) for values in near), default=0.0), _FAR * lowest)
    if highest > lowest:
        margin = 0.06 * (highest - lowest)
        ax.set_ylim(lowest - margin, highest + margin)


def _layers(ax: Axes, series: FSeries, part: int, title: str) -> None:
    for i, points in enumerate(series.layers.values()):
        values = np.array([np.nan if point[part] is None else point[part] for point in points], dtype=np.float64)
        colour = shade(i, len(series.layers))
        marker = "o" if len(points) == 1 else ""
        ax.plot([point[0] for point in points], values, f"{marker}-", color=colour, linewidth=1.3)
    ax.set_title(title)
    step_axis(ax, _FEW_TICKS)
