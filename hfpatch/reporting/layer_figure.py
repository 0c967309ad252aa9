"""The figure of what is known layer by layer: a panel a quantity, a line a method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hfpatch.reporting.layers import LayerSeries, Points
from hfpatch.reporting.lines import method_key
from hfpatch.reporting.results import Results
from hfpatch.reporting.theme import MUTED, Style, panels, short, styles

MOST_PANELS = 12
_MOST_GROUPS = 3
"""Above this many series of one method in a panel, their mean is drawn."""


def layer_figure(results: Results, series: Sequence[LayerSeries]) -> Figure | None:
    """Draw every quantity against the layer; None where nothing is known layer by layer."""
    shown = [each for each in series if each.method in results.methods and each.points]
    quantities = list(dict.fromkeys(each.quantity for each in shown))[:MOST_PANELS]
    if not quantities:
        return None
    drawn = {each.method for each in shown if each.quantity in quantities}
    looks = {name: look for name, look in styles(list(results.methods), results.baseline).items() if name in drawn}
    columns = min(3, len(quantities))
    figure, axes = panels(len(quantities), columns=3, width=11.0 / columns, height=2.6, key=len(looks))
    for quantity, ax in zip(quantities, axes, strict=True):
        _panel(ax, quantity, [each for each in shown if each.quantity == quantity], looks)
    method_key(figure, looks, line=True, marks=True)
    return figure


def _panel(ax: Axes, quantity: str, series: Sequence[LayerSeries], looks: dict[str, Style]) -> None:
    for method in dict.fromkeys(each.method for each in series):
        look = looks[method]
        for points in _lines([each.points for each in series if each.method == method]):
            layers = sorted(points)
            values = [points[layer] for layer in layers]
            ax.plot(layers, values, look.marker, color=look.colour, linestyle=look.dash, linewidth=1.5, markersize=4.5)
    for reference in {each.reference for each in series if each.reference is not None}:
        ax.axhline(reference, color=MUTED, linewidth=1.0, linestyle=(0, (1, 1.5)))
        ax.annotate("the paper's init", (1.0, reference), (0, 3), ax.get_yaxis_transform(), "offset points", ha="right")
    low, high = min(0.0, ax.get_ylim()[0]), max(0.0, ax.get_ylim()[1])
    ax.set_ylim(low, high + 0.06 * (high - low))
    if low < 0:
        ax.axhline(0, color=MUTED, linewidth=0.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.set_title(short(quantity, 44))
    ax.set_xlabel("layer")


def _lines(points: Sequence[Points]) -> list[Points]:
    if len(points) <= _MOST_GROUPS:
        return list(points)
    layers = sorted({layer for each in points for layer in each})
    return [{layer: float(np.mean([each[layer] for each in points if layer in each])) for layer in layers}]
