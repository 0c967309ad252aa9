"""How figures look, and writing them so that the same results give the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
from matplotlib.figure import Figure

Dash = str | tuple[int, tuple[float, ...]]

INK, MUTED, GRID, BAND, PAPER = "#1b1f24", "#5b636e", "#d9dde3", "#eceef1", "#ffffff"
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
GREY = "#8a929c"
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
    """How a method is drawn everywhere; colour alone never distinguishes it."""

    colour: str
    marker: str
    dash: Dash


def styles(methods: Sequence[str], baseline: str | None, shown: Container[str] | None = None) -> dict[str, Style]:
    """Return the style of each method (or of the ``shown`` ones) by its place in the run; the baseline is grey."""
    given = {} if baseline is None else {baseline: Style(GREY, "_", "-")}
    for i, method in enumerate(method for method in methods if method != baseline):
        dash = _DASHES[i // len(_COLOURS) % len(_DASHES)]
        given[method] = Style(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], dash)
    return given if shown is None else {name: look for name, look in given.items() if name in shown}


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


def short(name: str, limit: int = 26) -> str:
    """Return a name on one line, its middle left out where it is longer than ``limit``."""
    line = " ".join(name.split())
    if len(line) <= limit:
        return line
    head = (limit - 1) // 2
    return f"{line[:head]}…{line[head + 1 - limit :]}"


@report_style()
def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG document without dates, versions or random names.

    Coordinates are in hundredths of a point, ids are short; empty groups and indents are left out.
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = stream.getvalue()
    svg = re.sub(r'="[^"]*"', lambda value: re.sub(r"\s+", " ", re.sub(r"(\.\d\d)\d+", r"\1", value[0])), svg)
    names = dict.fromkeys(re.findall(r'(?:url\(|href=")#([\w.-]+)', svg))
    given = {name: f"i{index}" for index, name in enumerate(names)}
    svg = re.sub(r' id="([^"]*)"', lambda match: f' id="{given[match[1]]}"' if match[1] in given else "", svg)
    svg = re.sub(r'((?:url\(|href=")#)([\w.-]+)', lambda match: match[1] + given[match[2]], svg)
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    svg = re.sub(r"<g ?/>", "", svg)
    opened: list[bool] = []

    def group(tag: re.Match[str]) -> str:  # a group without attributes changes nothing
        if tag[0] == "</g>":
            return tag[0] if opened.pop() else ""
        opened.append(tag[0] != "<g>")
        return tag[0] if opened[-1] else ""

    return re.sub(r"\n\s+", "\n", re.sub(r"<g>|<g [^>]*>|</g>", group, svg))


@report_style()
def to_file(figure: Figure, kind: Literal["pdf", "png"]) -> bytes:
    """Return a figure without dates and versions: as PDF with its fonts, as it is laid out, or as PNG for a screen."""
    stream = io.BytesIO()
    if kind == "pdf":
        figure.set_layout_engine("none")
        figure.savefig(stream, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    else:
        figure.savefig(stream, format="png", dpi=200, metadata={"Software": None})
    return stream.getvalue()


_VARIABLES = {
    **{INK: "ink", MUTED: "muted", GRID: "line", BAND: "band", PAPER: "paper"},
    **{BLUE: "blue", VERMILLION: "vermillion", GREEN: "green", PURPLE: "purple", ORANGE: "orange", SKY: "sky"},
    GREY: "grey",
}


def inline(svg: str, prefix: str, label: str) -> str:
    """Return an SVG document of :func:`to_svg` as an element for an HTML page, in the colours of its scheme.

    Args:
        svg: the document.
        prefix: put before every id, so that one page can hold several figures.
        label: the name of the figure for screen readers; it must hold no HTML.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)
    body = body.replace("font-family: 'DejaVu Sans'; ", "")  # the page's own
    for colour, variable in _VARIABLES.items():
        body = re.sub(rf"(?<=[:] ){colour}\b", f"var(--{variable})", body)
    return body.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
