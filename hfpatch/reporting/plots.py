"""The plots that every report is drawn with: panels, forests, lines with bands, scatter, heat maps, and their keys.

Every function draws on matplotlib's axes. Colours and fonts are :mod:`hfpatch.reporting.theme`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from hfpatch.reporting.document import WORDS, Tone
from hfpatch.reporting.numbers import Change, Scale, signed
from hfpatch.reporting.theme import BAND, BLUE, GREY, INK, MUTED, PAPER, VERMILLION, Style, shade, short, to_svg

Floats = NDArray[np.float64]

COLUMNS = 4  # of panels, and of entries of a key
LARGEST = 1e30  # larger values are drawn at the edge, as infinities are
TONES: dict[Tone, tuple[str, str, str]] = {  # colour, marker and the face of the marker
    "better": (BLUE, "o", BLUE),
    "worse": (VERMILLION, "D", VERMILLION),
    "same": (INK, "s", INK),
    "undecided": (GREY, "o", PAPER),
    "not tested": (GREY, "x", GREY),
}
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
    count: int, *, columns: int, width: float, height: float, key: int = 0, share_y: bool = False, title: str = ""
) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``count`` panels of ``width`` x ``height`` inches, at most ``columns`` side by side.

    Below them is space for a key of ``key`` entries; with ``share_y`` all panels have the same vertical axis. A figure
    that is shown alone has a ``title`` above all panels.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    size = (width * columns, height * rows + 0.21 * -(-key // COLUMNS))
    figure = _Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=10.5, color=INK)
    return figure, axes[:count]


def to_svgs(figures: Mapping[str, Figure]) -> dict[str, str]:
    """Return figures as SVG documents."""
    return {name: to_svg(figure) for name, figure in figures.items()}


def robust_limit(sizes: Iterable[float], times: float = 2.0) -> float:
    """Return the largest of ``sizes``, or if that is an outlier ``times`` the upper quartile; 1 if none is known."""
    finite = [size for size in sizes if 0 < size < LARGEST]
    return min(max(finite), times * float(np.quantile(finite, 0.75))) if finite else 1.0


def integer_axis(ax: Axes, label: str, ticks: int | Literal["auto"] = "auto") -> None:
    """Make the horizontal axis one of whole numbers, such as steps or layers, with at most ``ticks`` intervals."""
    ax.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    ax.set_xlabel(label)


def named_rows(ax: Axes, names: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a panel, from the top down."""
    ax.set_yticks(range(len(names)), [short(name, 48) for name in names], color=INK)
    ax.set_ylim(len(names) - 0.4, -0.6)


@dataclass(frozen=True)
class Interval:
    """A row of a forest.

    Attributes:
        change: the difference with the interval of its verdict (NaN if it has none).
        verdict: decides colour and mark.
        plain: the interval of this difference alone, where it is not that of the verdict.
    """

    change: Change
    verdict: Tone
    plain: tuple[float, float] | None = None


def forest(
    ax: Axes,
    names: Sequence[str],
    rows: Mapping[int, Interval],
    *,
    limits: tuple[float, float],
    margin: float | None = None,
) -> None:
    """Draw gains around zero, a row each, within ``limits``; to the right is better.

    ``rows`` are by their place in ``names``. A grey band spans the differences within ± ``margin``. A difference
    outside the panel is an arrow at its edge with its number.
    """
    left, right = limits
    ax.set_xlim(left, right)
    if margin is not None:
        ax.axvspan(-margin, margin, color=BAND, zorder=1)
    for y, row in rows.items():
        change, (colour, marker, face) = row.change, TONES[row.verdict]
        low, high = np.clip([change.low, change.high], left, right)
        if low < high and not math.isinf(change.high - change.low):
            ax.hlines(y, low, high, color=colour, linewidth=1.8 if row.plain is None else 0.9, zorder=3)
        if row.plain is not None and all(map(math.isfinite, row.plain)):
            inner = np.clip(row.plain, left, right)
            ax.hlines(y, inner[0], inner[1], color=colour, linewidth=2.8, zorder=3)
        if left <= change.difference <= right:
            ax.plot(change.difference, y, marker, color=colour, markerfacecolor=face, markersize=6.5, zorder=4)
        else:
            above = change.difference > right
            edge, offset, side = (0.97, -6, "right") if above else (0.03, 6, "left")
            transform = ax.get_yaxis_transform()
            ax.plot(edge, y, marker=">" if above else "<", color=colour, markersize=6.5, zorder=4, transform=transform)
            digits = 0 if abs(change.difference) >= 10 else 2
            text = f"{signed(change.difference, digits)}{' %' if change.scale is Scale.RELATIVE else ''}"
            ax.annotate(text, (edge, y), (offset, 0), transform, "offset points", ha=side, va="center", color=INK)
    ax.axvline(0, color=MUTED, linewidth=1.0, zorder=2)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    named_rows(ax, names)


def verdict_key(figure: Figure, verdicts: Iterable[Tone], *, margin: str = "") -> None:
    """Put the key of a forest below the panels; ``margin`` names the band of the margin."""
    handles: list[Line2D | Patch] = []
    for verdict in verdicts:
        colour, marker, face = TONES[verdict]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": face}
        handles.append(Line2D([], [], linewidth=1.8, label=WORDS.get(verdict, verdict), **look))
    if margin:
        handles.append(Patch(color=BAND, label=margin))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, handletextpad=0.5, columnspacing=1.8)


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
    limits: tuple[float, float] | None = None,
    diverging: bool = False,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> None:
    """Draw the values of ``cells``, each with its layer and head, as colours between ``limits``; NaN is left out.

    ``diverging``: values below the middle of the limits have a colour of their own. ``names`` are those of the rows and
    columns, where these are no layers and heads.
    """
    values = np.full((1 + max(layer for layer, *_ in cells), 1 + max(head for _, head, _ in cells)), np.nan)
    for layer, head, value in cells:
        values[layer, head] = value
    low, high = limits or (None, None)
    colours = _DIVERGING if diverging else _RISING
    mesh = ax.pcolormesh(values, cmap=colours, vmin=low, vmax=high, edgecolor=PAPER, linewidth=0.8)
    ax.figure.colorbar(mesh, ax=ax, aspect=25).outline.set_visible(False)
    ax.set(xlabel="head", ylabel="layer")
    ax.invert_yaxis()
    ax.grid(visible=False)
    for axis, count in ((ax.yaxis, values.shape[0]), (ax.xaxis, values.shape[1])):
        step = -(-count // 12)
        labels = names[axis is ax.xaxis] if names is not None else [str(i) for i in range(count)]
        axis.set_ticks(np.arange(0, count, step) + 0.5, labels[::step])
