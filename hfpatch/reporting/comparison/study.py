"""The figure of a study of models from scratch: what f does by step."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from hfpatch.reporting import plots
from hfpatch.reporting.theme import MUTED, short
from hfpatch.results.comparison import ComparisonResults

DIAGNOSTICS = (
    "What f does on the evaluation text, a line a layer, from the first (light) to the last (dark), the mean over "
    "seeds: ‖f(x)‖/‖x‖, and the angle of f(x) and A(x), what f is added to."
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
