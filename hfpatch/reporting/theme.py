"""How figures look, and writing them so that the same results give the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

Dash = str | tuple[int, tuple[float, ...]]

INK, MUTED, GRID, BAND, PAPER = "#1b1f24", "#5b636e", "#d9dde3", "#eceef1", "#ffffff"
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
GREY = "#8a929c"
KEY_COLUMNS = 4
"""How many entries of a key stand side by side."""
_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)  # Okabe and Ito's, less black and yellow
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Dash, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))

_RC = {
    "svg.hashsalt": "hfpatch",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.0,
    "axes.edgecolor": GRID,
    "axes.facecolor": PAPER,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "figure.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}


@dataclass(frozen=True)
class Style:
    """How a method is drawn everywhere: never told apart by colour alone."""

    colour: str
    marker: str
    dash: Dash


def styles(methods: Sequence[str], baseline: str | None) -> dict[str, Style]:
    """Give each method its colour, marker and dash, by its place in the run; the baseline is grey."""
    others = [method for method in methods if method != baseline]
    given = {
        method: Style(
            _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], _DASHES[i // len(_COLOURS) % len(_DASHES)]
        )
        for i, method in enumerate(others)
    }
    return given if baseline is None else {baseline: Style(GREY, "_", "-"), **given}


def shade(index: int, count: int) -> tuple[float, float, float]:
    """Return the blue of one of ``count`` lines that have an order, such as layers: from light to dark."""
    mixed = 0.25 + 0.75 * (index + 1) / count
    red, green, blue = (1 - mixed * (1 - int(BLUE[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return red, green, blue


@contextmanager
def report_style() -> Iterator[None]:
    """Draw in the report's style, whatever the user's matplotlib is set to."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def panels(
    count: int, *, columns: int, width: float, height: float, key: int = 0, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``count`` panels in rows of at most ``columns``.

    Args:
        count: how many panels.
        columns: how many stand side by side.
        width: inches of one panel.
        height: inches of one panel.
        key: how many entries the key below the panels will have.
        share_y: whether all panels have the same vertical axis.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    size = (width * columns, height * rows + 0.21 * -(-key // KEY_COLUMNS))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def short(name: str, limit: int = 26) -> str:
    """Return a name on one line, its middle left out where it is longer than ``limit``."""
    line = " ".join(name.split())
    if len(line) <= limit:
        return line
    head = (limit - 1) // 2
    return f"{line[:head]}…{line[head + 1 - limit :]}"


def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG document without dates, versions or random names."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return stream.getvalue()


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG at 200 dots an inch, without the writer's version."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=200, metadata={"Software": None})
    return stream.getvalue()


_VARIABLES = {
    **{INK: "ink", MUTED: "muted", GRID: "line", BAND: "band", PAPER: "paper"},
    **{BLUE: "blue", VERMILLION: "vermillion", GREEN: "green", PURPLE: "purple", ORANGE: "orange", SKY: "sky"},
    GREY: "grey",
}


_EVERYWHERE = {"ink", "muted", "line", "band", "paper", "blue", "vermillion"}
"""The variables that every page defines; of the others the colour itself stands behind the variable."""


def inline(svg: str, prefix: str, label: str) -> str:
    """Return an SVG document as an element for an HTML page.

    Args:
        svg: the document, from :func:`to_svg`.
        prefix: put before every id, so that several figures can stand in one page.
        label: what the figure shows, for those who cannot see it; it must hold no HTML.

    The colours that the page knows too become its CSS variables, so the figure follows its light or dark scheme.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)
    for colour, variable in _VARIABLES.items():
        known = f"var(--{variable})" if variable in _EVERYWHERE else f"var(--{variable}, {colour})"
        body = re.sub(rf"(?<=[:] ){colour}\b", known, body)
    return body.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
