"""The plots that several figures are drawn with: panels, lines, heat maps, and their keys.

Every function draws on matplotlib's axes. Colours and fonts are :mod:`hfpatch.reporting.theme`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from hfpatch.reporting.theme import BLUE, INK, PAPER, VERMILLION, Style, shade, short

Floats = NDArray[np.float64]

COLUMNS = 4  # of panels, and of entries of a key
LARGEST = 1e30  # larger values are drawn at the edge, as infinities are
_SHADES = 48  # from 49 on, matplotlib turns a colour bar into a picture
_DIVERGING = LinearSegmentedColormap.from_list("hfpatch", [VERMILLION, "#f4f4f4", BLUE], N=_SHADES)
_RISING = LinearSegmentedColormap.from_list("hfpatch_rising", ["#f4f4f4", BLUE], N=_SHADES)


class _Figure(Figure):
    """A figure that is drawn once: ``savefig`` draws it for its layout first, which takes no drawing."""

    def draw(self, renderer: RendererBase) -> None:
        engine = self.get_layout_engine()
        if isinstance(engine, ConstrainedLayoutEngine):  # while it is saved, the second time, there is none
            engine.execute(self)
        else:
            super().draw(renderer)


def panels(
    count: int, *, columns: int, width: float, height: float, key: int = 0, title: str = ""
) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``count`` panels of ``width`` x ``height`` inches, at most ``columns`` side by side.

    Below them is space for a key of ``key`` entries. A figure that is shown alone has a ``title`` above all panels.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    size = (width * columns, height * rows + 0.21 * -(-key // COLUMNS))
    figure = _Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=10.5, color=INK)
    return figure, axes[:count]


def robust_limit(sizes: Iterable[float], times: float = 2.0) -> float:
    """Return the largest of ``sizes``, or if that is an outlier ``times`` the upper quartile; 1 if none is known."""
    finite = [size for size in sizes if 0 < size < LARGEST]
    return min(max(finite), times * float(np.quantile(finite, 0.75))) if finite else 1.0


def integer_axis(ax: Axes, label: str, ticks: int) -> None:
    """Make the horizontal axis one of whole numbers, such as steps or layers, with at most ``ticks`` intervals.

    A number of ticks that depends on the width may change once the layout is made, which then cuts the last one's text.
    """
    ax.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    ax.set_xlabel(label)


def named_rows(ax: Axes, names: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a panel, from the top down."""
    ax.set_yticks(range(len(names)), [short(name, 48) for name in names], color=INK)
    ax.set_ylim(len(names) - 0.4, -0.6)


def line(ax: Axes, x: ArrayLike, y: ArrayLike, look: Style, index: int) -> None:
    """Draw a line with a mark at every few points, so that colour alone does not distinguish it.

    The marks of lines of different ``index`` are at different x.
    """
    x, every = np.asarray(x), max(1, np.size(x) // 7)
    marks: dict[str, Any] = {"markersize": 4.0, "markevery": (index % every, every)}
    ax.plot(x, y, look.marker, color=look.colour, linestyle=look.dash, linewidth=1.5, **marks)


def layer_lines(ax: Axes, lines: Sequence[tuple[ArrayLike, ArrayLike]], **options: Any) -> None:
    """Draw a line a layer, from the first (light) to the last (dark)."""
    for i, (x, y) in enumerate(lines):
        ax.plot(x, y, color=shade(i, len(lines)), **options)


def method_key(figure: Figure, looks: Mapping[str, Style], *, points: bool = False) -> None:
    """Put the key of the methods below the panels: lines with their marks, or of ``points`` the marks alone."""
    handles = []
    for name, look in looks.items():
        baseline = look.marker == "_"  # among points, it is a line
        marker = "" if points and baseline else look.marker
        dash, size = (look.dash, 6) if baseline or not points else ("none", 8)
        style: dict[str, Any] = {"color": look.colour, "marker": marker, "markersize": size, "linestyle": dash}
        handles.append(Line2D([], [], markeredgecolor=PAPER if marker else None, label=short(name), **style))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(COLUMNS, len(handles)), columnspacing=1.8)


def smooth(values: ArrayLike) -> Floats:
    """Return the centred running mean over a 25th of the values; at the ends over fewer of them."""
    values = np.asarray(values)
    window = values.size // 25
    if window <= 1:
        return values
    ones = np.ones(window)
    mean: Floats = np.convolve(values, ones, "same") / np.convolve(np.ones(values.size), ones, "same")
    return mean


def heat_map(
    ax: Axes,
    cells: Sequence[tuple[int, int, float]],
    *,
    limits: tuple[float, float],
    diverging: bool = False,
) -> None:
    """Draw the values of ``cells``, each with its layer and head, as colours between ``limits``; NaN is left out.

    ``diverging``: values below the middle of the limits have a colour of their own.
    """
    values = np.full((1 + max(layer for layer, *_ in cells), 1 + max(head for _, head, _ in cells)), np.nan)
    for layer, head, value in cells:
        values[layer, head] = value
    colours = _DIVERGING if diverging else _RISING
    mesh = ax.pcolormesh(values, cmap=colours, vmin=limits[0], vmax=limits[1], edgecolor=PAPER, linewidth=0.8)
    ax.figure.colorbar(mesh, ax=ax, aspect=25).outline.set_visible(False)
    ax.set(xlabel="head", ylabel="layer")
    ax.invert_yaxis()
    ax.grid(visible=False)
    for axis, count in ((ax.yaxis, values.shape[0]), (ax.xaxis, values.shape[1])):
        step = -(-count // 12)
        axis.set_ticks(np.arange(0, count, step) + 0.5, [str(i) for i in range(0, count, step)])
