"""What figures with lines share: a line told apart by more than its colour, its axis and its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hfpatch.reporting.curves import Floats
from hfpatch.reporting.theme import KEY_COLUMNS, PAPER, Style, short

LARGEST = 1e30
"""What is larger is drawn at the edge, as infinities are."""
_OUTLIER = 2.0  # a panel reaches at most this many times the upper quartile of what it holds


def draw_line(ax: Axes, steps: NDArray[np.int64], values: Floats, look: Style, place: int) -> None:
    """Draw a line with a mark now and then, so that it is not told by its colour alone.

    The marks of the lines of different ``place`` stand at different steps.
    """
    every = max(1, len(steps) // 7)
    ax.plot(
        steps,
        values,
        look.marker,
        color=look.colour,
        linestyle=look.dash,
        linewidth=1.5,
        markersize=4.0,
        markevery=(place % every, every),
    )


def step_axis(ax: Axes, ticks: int | None = None) -> None:
    """Make the horizontal axis one of training steps, with at most ``ticks`` ticks where that is given."""
    ax.xaxis.set_major_locator(MaxNLocator(ticks or "auto", integer=True))
    ax.set_xlabel("step")


def method_key(figure: Figure, looks: Mapping[str, Style], *, line: bool, marks: bool | None = None) -> None:
    """Put the key of the methods below the panels: dashes for lines, marks for points (``marks``: for both)."""
    handles = []
    for name, look in looks.items():
        dashed = line or look.marker == "_"
        marker = look.marker if marks or not dashed else None
        style = look.dash if dashed else "none"
        handles.append(
            Line2D(
                [],
                [],
                color=look.colour,
                marker=marker,
                linestyle=style,
                markersize=6 if dashed else 8,
                markeredgecolor=PAPER if marker else None,
                label=short(name),
            )
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(KEY_COLUMNS, len(handles)), columnspacing=1.8)


def reach(sizes: Sequence[float]) -> float:
    """Return the largest of ``sizes``, outliers and what is not finite left out."""
    finite = [size for size in sizes if 0 < size < LARGEST]
    return min(max(finite), _OUTLIER * float(np.quantile(finite, 0.75))) if finite else 1.0
