"""The figures of a pretraining study."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from hfpatch.reporting import plots
from hfpatch.reporting.numbers import MOST_METHODS, signed
from hfpatch.reporting.study.answer import change_of, point_text, share
from hfpatch.reporting.study.tables import series_of, spread_of
from hfpatch.reporting.tabular import csv_text
from hfpatch.reporting.theme import MUTED, report_style, shade, short, styles
from hfpatch.results.schema import AtStep, Row, StudyResults

_MOST_F_PANELS = 24
_OUTLIER = 20.0  # times the middle variant's improvement
_FAR = 1.5  # times the lowest loss of all
_WIDE = 10.0  # a spread that changes more than so many times is drawn on a logarithmic axis
_FEW_TICKS = 5  # on the steps of a narrow panel
_DECIDED = ("corrected_low", "corrected_high", "p_corrected", "family", "outcome")


@report_style()
def draw(study: StudyResults) -> dict[str, Figure]:
    """Return the figures that can be drawn, by name, in the order of reading."""
    drawn = {
        "differences": differences(study),
        "loss": losses(study),
        "improvement": improvements(study),
        "diagnostics": diagnostics(study),
        "spread": spreads(study),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


@report_style()
def differences(study: StudyResults, *, title: bool = False) -> Figure | None:
    """Draw the improvements at the end with their intervals, a row a variant; None where there is none.

    With ``title`` the figure can be shown alone.
    """
    rows = [row for row in _shown(study).values() if row.improvement is not None and row.variant != study.baseline]
    if not rows:
        return None
    seeds = f"{len(study.seeds)} seed{'s' * (len(study.seeds) != 1)}"
    shown = f"Validation loss against {short(study.baseline)} ({seeds})" if title else ""
    height = (1.75 if title else 1.4) + 0.34 * len(rows)
    figure, (ax,) = plots.panels(1, columns=1, width=7.4, height=height, title=shown)
    drawn = {}
    for y, row in enumerate(rows):  # in per cent; a single seed is no mark of its own
        found, values = study.verdict(row.variant), [100 * value for value in study.seed_values(row).values()]
        plain = (100 * found.low, 100 * found.high) if found.p_corrected is not None else None
        single = values if len(values) > 1 else ()
        drawn[y] = plots.Interval(change_of(study, row.variant), found.tone, single, plain)
    limit = 1.12 * plots.robust_limit((max(_sizes(study, row)) for row in rows), _OUTLIER, median_low)
    plots.forest(ax, [row.variant for row in rows], drawn, limits=(-limit, limit))
    ax.set_xlabel(f"improvement over {short(study.baseline)}, % of its validation loss\nbetter →")
    more = [f"{signed(100 * share(study, row.variant), 2)} %" for row in rows]
    plots.side_column(ax, "parameters", more, 64)
    plots.verdict_key(figure, dict.fromkeys(study.verdict(row.variant).tone for row in rows))
    return figure


def losses(study: StudyResults) -> Figure | None:
    """Draw the validation loss by step, the whole and its second half; None where nothing was measured."""
    rows = {name: row for name, row in _shown(study).items() if row.curve}
    if not rows:
        return None
    looks = styles(list(study.variants), study.baseline, rows)
    last = max(row.curve[-1][0] for row in rows.values())
    late = {name: [point for point in row.curve if point[0] >= last / 2] for name, row in rows.items()}
    zoomed = any(len(points) > 1 for points in late.values())
    figure, axes = plots.panels(1 + zoomed, columns=2, width=5.5, height=3.1, key=len(looks))
    for place, (name, row) in enumerate(rows.items()):
        steps, mean, *band = _by_step(row.curve)
        plots.line(axes[0], steps, mean, looks[name], place, band)
        for run in study.runs_of(row):
            measured = [(step, loss) for step, loss in run.evaluation if loss is not None and abs(loss) < plots.LARGEST]
            if run.outcome == "diverged" and measured:
                axes[0].plot(*measured[-1], "x", color=looks[name].colour, markersize=7, markeredgewidth=2, zorder=5)
        if zoomed and len(late[name]) > 1:
            steps, mean, *band = _by_step(late[name])
            plots.line(axes[1], steps, mean, looks[name], place, band)
    for ax, title in zip(axes, ("Validation loss", "The second half, larger"), strict=False):
        ax.set(title=title, ylabel="nats per token   ↓ better")
        plots.integer_axis(ax, "step")
    known = [np.concatenate(_by_step(points)[1:]) for points in late.values() if points]
    known = [values[np.isfinite(values)] for values in known if np.isfinite(values).any()]
    if zoomed and known:  # all lines but those far above the lowest
        lowest = min(float(values.min()) for values in known)
        near = [float(values.max()) for values in known if values.min() <= _FAR * lowest]
        highest = min(max(near, default=0.0), _FAR * lowest)
        margin = 0.06 * (highest - lowest)
        if margin > 0:
            axes[1].set_ylim(lowest - margin, highest + margin)
    plots.method_key(figure, looks)
    return figure


def improvements(study: StudyResults) -> Figure | None:
    """Draw the relative improvement by step: all variants, then each with its interval; None where there is none."""
    rows = {name: row for name, row in _shown(study).items() if row.improvement_by_step and name != study.baseline}
    if not rows:
        return None
    looks = styles(list(study.variants), study.baseline, rows)
    several = len(rows) > 1
    columns = min(plots.COLUMNS, len(rows) + several)
    width, height = (11.0 / columns, 2.7) if several else (7.4, 3.1)
    figure, axes = plots.panels(
        len(rows) + several, columns=columns, width=width, height=height, key=len(looks), share_y=True
    )
    if several:
        axes[0].set_title("all, the means")
    for place, (name, row) in enumerate(rows.items()):
        steps, mean, *band = _by_step(row.improvement_by_step, 100)
        if several:
            plots.line(axes[0], steps, mean, looks[name], place)
        plots.line(axes[place + several], steps, mean, looks[name], place, band)
        axes[place + several].set_title(short(name, 30))
    for i, ax in enumerate(axes):
        ax.axhline(0, color=MUTED, linewidth=1.0, zorder=1)
        plots.integer_axis(ax, "step", _FEW_TICKS)
        if i % columns == 0:
            ax.set_ylabel("improvement, %   ↑ better")
    sizes = []  # how far most of each reaches, and all that is known of it at the end
    for row in rows.values():
        means = [abs(100 * mean) for _, mean, *_ in row.improvement_by_step if mean is not None]
        sizes.append(max([float(np.quantile(means, 0.9)) if means else 0.0, *_sizes(study, row)]))
    limit = 1.12 * plots.robust_limit(sizes, _OUTLIER, median_low)
    axes[0].set_ylim(-limit, limit)
    plots.method_key(figure, looks)
    return figure


def diagnostics(study: StudyResults) -> Figure | None:
    """Draw the size of f and its cosine by step, a line a layer and two panels a variant; None without any."""
    shown = [series for series in series_of(study) if series.layers][: _MOST_F_PANELS // 2]
    if not shown:
        return None
    columns = plots.COLUMNS if len(shown) > 1 else 2
    figure, axes = plots.panels(2 * len(shown), columns=columns, width=11.0 / columns, height=2.5)
    for i, series in enumerate(shown):
        name = short(series.variant if series.target == "query" else f"{series.variant}, {series.target}", 26)
        layers = [np.array(points, dtype=np.float64).T for points in series.layers.values()]
        marker = "o" if any(steps.size == 1 for steps, *_ in layers) else ""  # one step alone is no line
        for part, what, ax in ((1, "‖f‖/‖A‖", axes[2 * i]), (2, "cos(f, A)", axes[2 * i + 1])):
            plots.layer_lines(ax, [(by[0], by[part]) for by in layers], marker=marker, linewidth=1.3)
            ax.set_title(f"{name}: {what}")
            plots.integer_axis(ax, "step", _FEW_TICKS)
        axes[2 * i].set_ylim(bottom=0)
        axes[2 * i + 1].axhline(0, color=MUTED, linewidth=0.8)
    known = sorted({layer for series in shown for layer in series.layers})
    if len(known) > 1:
        ends = [(known[0], 0), (known[-1], len(known) - 1)]
        handles = [Line2D([], [], color=shade(i, len(known)), label=f"layer {layer}") for layer, i in ends]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def spreads(study: StudyResults) -> Figure | None:
    """Draw the standard deviation over seeds of the validation loss by step; None with fewer than two seeds."""
    found = {name: points for name, row in _shown(study).items() if (points := spread_of(study, row))}
    if not found:
        return None
    looks = styles(list(study.variants), study.baseline, found)
    figure, (ax,) = plots.panels(1, columns=1, width=7.4, height=2.9, key=len(looks))
    for place, (name, points) in enumerate(found.items()):
        steps, heights = zip(*points, strict=True)
        plots.line(ax, steps, heights, looks[name], place)
    values = [value for points in found.values() for _, value in points]
    if min(values) > 0 and max(values) > _WIDE * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_ylim(bottom=0)
    plots.integer_axis(ax, "step")
    ax.set_ylabel("standard deviation, nats per token")
    plots.method_key(figure, looks)
    return figure


def _shown(study: StudyResults) -> dict[str, Row]:
    kept = {study.baseline, *study.others[:MOST_METHODS]}
    return {name: row for name, row in study.chosen.items() if name in kept}


def _sizes(study: StudyResults, row: Row) -> list[float]:
    """Return how far a row of the forest reaches, in per cent: mean, interval ends and single seeds."""
    improvement = row.improvement
    if improvement is None:
        return []
    ends = [end for end in (improvement.mean, improvement.low, improvement.high) if end is not None]
    return [abs(100 * end) for end in (*ends, *study.seed_values(row).values())]


def _by_step(points: Sequence[AtStep], factor: float = 1.0) -> list[plots.Floats]:
    """Return steps, and mean, low and high times ``factor``; unknown values are NaN, which is not drawn."""
    steps, *values = np.array(points, dtype=np.float64).reshape(-1, 4).T
    return [steps, *(np.where(np.abs(factor * value) > plots.LARGEST, np.nan, factor * value) for value in values)]


def figure_csv(name: str, study: StudyResults) -> str:
    """Return the data of the figure called ``name``; of losses and improvements at every sweep point."""
    rows: list[tuple[object, ...]] = []
    match name:
        case "differences":
            headings = ["variant", "point", "best", "improvement", "low", "high", "p", *_DECIDED]
            headings += ["seed", "improvement_of_seed"]
            for row in study.rows:
                if (found := row.improvement) is not None:
                    tested = row.best and row.variant != study.baseline
                    verdict = study.verdict(row.variant).to_json() if tested else {}
                    start = row.variant, point_text(row.point), int(row.best), found.mean, found.low, found.high
                    known = *start, found.p, *map(verdict.get, _DECIDED)
                    rows += [(*known, *each) for each in study.seed_values(row).items() or [(None, None)]]
        case "loss" | "improvement":
            headings = ["variant", "point", "step", "mean", "low", "high"]
            for row in study.rows:
                points = row.curve if name == "loss" else row.improvement_by_step
                rows += [(row.variant, point_text(row.point), *point) for point in points]
        case "diagnostics":
            headings = ["variant", "target", "layer", "step", "size", "cosine", "seeds"]
            for series in series_of(study):
                for layer, by_step in series.layers.items():
                    rows += [(series.variant, series.target, layer, *point, series.seeds) for point in by_step]
        case _:
            headings = ["variant", "step", "sd"]
            rows += [(name, *point) for name, row in study.chosen.items() for point in spread_of(study, row)]
    return csv_text(headings, rows)
