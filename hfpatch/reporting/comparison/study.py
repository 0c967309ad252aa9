"""The figures of a study of models from scratch: what f does by step, and the losses of trials by two values."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from hfpatch.reporting import plots
from hfpatch.reporting.tabular import csv_text
from hfpatch.reporting.theme import INK, MUTED, short
from hfpatch.results.comparison import ComparisonResults

DIAGNOSTICS = (
    "What f does on the evaluation text, a line a layer, from the first (light) to the last (dark), the mean over "
    "seeds: ‖f(x)‖/‖x‖, and the angle of f(x) and A(x), what f is added to."
)
TRIALS = (
    "The loss on the text of tuning after each trial, nats per token, of several trials with the same two values the "
    "lowest. The ring is the choice; a cross diverged."
)
_FEW_TICKS = 5  # on the steps of a narrow panel


def diagnostics(results: ComparisonResults) -> Figure | None:
    """Draw the size of f and its angle by step, a line a layer and two panels a variant; None without any."""
    lines: dict[str, dict[int, list[tuple[int, float, float]]]] = {}
    for name, method in results.methods.items():
        for point in method.variant.diagnostics if method.variant is not None else ():
            title = name if point.target == "query" else f"{name}, {point.target}"
            size = math.nan if point.size_beside_x is None else point.size_beside_x
            angle = math.nan if point.cosine is None else math.degrees(math.acos(min(1.0, max(-1.0, point.cosine))))
            lines.setdefault(title, {}).setdefault(point.layer, []).append((point.step, size, angle))
    if not lines:
        return None
    columns = plots.COLUMNS if len(lines) > 1 else 2
    figure, axes = plots.panels(2 * len(lines), columns=columns, width=11.0 / columns, height=2.5)
    for i, (title, layers) in enumerate(lines.items()):
        points = [np.array(sorted(points)).T for _, points in sorted(layers.items())]
        marker = "o" if any(steps.size == 1 for steps, *_ in points) else ""  # one step alone is no line
        for part, what, ax in ((1, "‖f‖/‖x‖", axes[2 * i]), (2, "angle of f and A, °", axes[2 * i + 1])):
            plots.layer_lines(ax, [(by[0], by[part]) for by in points], marker=marker, linewidth=1.3)
            ax.set(title=short(title), ylabel=what)
            plots.integer_axis(ax, "step", _FEW_TICKS)
        axes[2 * i].set_ylim(bottom=0)
        axes[2 * i + 1].axhline(90, color=MUTED, linewidth=0.8)
    return figure


def diagnostics_csv(results: ComparisonResults) -> str:
    """Return what f does in every layer, by step."""
    fields = "step", "layer", "target", "size", "cosine", "size_beside_x"
    variants = {name: method.variant for name, method in results.methods.items() if method.variant is not None}
    rows = ((name, *(getattr(e, f) for f in fields)) for name, variant in variants.items() for e in variant.diagnostics)
    return csv_text(("method", *fields), rows)


def trial_maps(results: ComparisonResults) -> Figure | None:
    """Draw the loss of tuning's trials by learning rate and a second value, a panel a method; None without one."""
    tuning = results.tuning
    trials = tuning.trials if tuning is not None else []
    tried: dict[str, set[float]] = {}
    for key, value in (item for trial in trials for item in trial.values.items()):
        if isinstance(value, int | float) and key != "lr":
            tried.setdefault(key, set()).add(value)
    varied = [key for key, values in tried.items() if len(values) > 1]
    if tuning is None or not varied:
        return None
    key = varied[0]
    maps: dict[str, dict[tuple[float, float], float]] = {}  # the lowest loss at both values, infinite: all diverged
    for trial in trials:
        if trial.method in results.methods and trial.rate is not None and key in trial.values:
            cells, at = maps.setdefault(trial.method, {}), (trial.rate, float(trial.values[key]))
            cells[at] = min(cells.get(at, math.inf), trial.compared_loss)
    losses = [loss for cells in maps.values() for loss in cells.values() if loss < plots.LARGEST]
    if not losses:
        return None
    least = min(losses)
    most = least + plots.robust_limit(loss - least for loss in losses) if max(losses) > least else least + 1.0
    wide = min(3, len(maps))  # rates of five letters do not touch
    figure, axes = plots.panels(len(maps), columns=wide, width=11.0 / max(2, wide), height=2.6)
    for (method, cells), ax in zip(maps.items(), axes, strict=True):
        rates, others = (sorted({at[i] for at in cells}) for i in (0, 1))
        placed_losses = [(rates.index(rate), others.index(other), loss) for (rate, other), loss in cells.items()]
        finite = [(y, x, loss if loss < plots.LARGEST else math.nan) for x, y, loss in placed_losses]
        rows, columns = ([f"{value:g}" for value in values] for values in (others, rates))
        plots.heat_map(ax, finite, limits=(least, most), names=(rows, columns))
        ax.set(title=short(method), xlabel="learning rate", ylabel=key.replace("_", " "))
        for x, y, loss in placed_losses:
            if loss >= plots.LARGEST:
                ax.plot(x + 0.5, y + 0.5, "x", color=MUTED, markersize=7)
        choice = tuning.chosen.get(method)
        rate, other = (choice.rate, choice.values.get(key)) if choice and choice.is_tuned else (None, None)
        if rate is not None and isinstance(other, int | float) and (rate, other) in cells:
            ax.plot(rates.index(rate) + 0.5, others.index(other) + 0.5, "o", color=INK, markerfacecolor="none", ms=12)
    return figure
