"""The figures of an inspection, each a function from what was found to a matplotlib figure, or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hfpatch.analysis.inspection import Inspection
from hfpatch.analysis.relation import HeadRelation, Relation
from hfpatch.reporting.theme import BLUE, GREY, INK, MUTED, PAPER, VERMILLION, panels, report_style, shade, to_svg

_MARKERS = ("o", "s", "^", "D")
_SHADES = 48  # from 49 on, matplotlib turns a colour bar into a picture
_DIVERGING = LinearSegmentedColormap.from_list("hfpatch", [VERMILLION, "#f4f4f4", BLUE], N=_SHADES)
_RISING = LinearSegmentedColormap.from_list("hfpatch_rising", ["#f4f4f4", BLUE], N=_SHADES)


@dataclass(frozen=True)
class Drawing:
    """One figure of the page.

    Attributes:
        name: of its ids and its file.
        title: what it shows.
        caption: how to read it.
        draw: makes it, or returns None where there is nothing to draw.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Inspection], Figure | None]


def _relation_map(found: Inspection) -> Figure | None:
    if not found.relations:
        return None
    rows = [found.relations, *([found.relations_patched] if found.relations_patched else [])]
    figure, axes = panels(3 * len(rows), columns=3, width=3.7, height=_map_height(found.relations))
    values = [each.here.effective_rank for relations in rows for each in relations]
    ranks = (min(values), max(values))
    for row, relations in enumerate(rows):
        ending = ", with the patch" if row else ""
        here = [(each.layer, each.head, each.here) for each in relations]
        _map(axes[3 * row], here, lambda r: r.symmetric, f"symmetric share{ending}", 0.5)
        _map(axes[3 * row + 1], here, lambda r: r.positive_energy, f"positive share{ending}", 0.5)
        _map(axes[3 * row + 2], here, lambda r: r.effective_rank, f"effective rank{ending}", None, ranks)
    return figure


def _offsets(found: Inspection) -> Figure | None:
    relations = found.relations_patched or found.relations
    if not relations or len(relations[0].by_offset) < 2:
        return None
    figure, axes = panels(3, columns=3, width=3.7, height=2.7)
    _lines(axes[0], relations, lambda r, _: r.symmetric, "symmetric share")
    _lines(axes[1], relations, lambda r, _: r.positive_energy, "positive share")
    _lines(axes[2], relations, lambda r, first: r.norm / first.norm if first.norm else np.nan, "‖B(Δ)‖ / ‖B(0)‖")
    for ax in axes[:2]:
        ax.axhline(0.5, color=MUTED, linewidth=0.8)
    for ax in axes:
        ax.ticklabel_format(axis="y", useOffset=False)
    return figure


def _skips(found: Inspection) -> Figure | None:
    if not found.skip_norms:
        return None
    figure, axes = panels(2 if found.skip_sizes else 1, columns=2, width=5.5, height=2.7)
    layers = [each.layer for each in found.skip_norms]
    axes[0].plot(layers, [each.norm for each in found.skip_norms], "o", color=BLUE, label="learned")
    start = [each.at_paper_init for each in found.skip_norms]
    axes[0].plot(layers, start, "_", color=GREY, markersize=12, label="at the paper's init, 1e-4·d")
    _from_zero(axes[0])
    axes[0].legend()
    _title(axes[0], "‖W_skip‖")
    if found.skip_sizes:
        axes[1].plot(
            [each.layer for each in found.skip_sizes], [each.size for each in found.skip_sizes], "o", color=BLUE
        )
        _from_zero(axes[1])
        _title(axes[1], "‖x~W_skip‖ / ‖attention output‖")
    return figure


def _pre_projections(found: Inspection) -> Figure | None:
    if not found.pre_projection_sizes:
        return None
    figure, (ax,) = panels(1, columns=1, width=5.5, height=2.6)
    sizes = found.pre_projection_sizes
    ax.plot([each.layer for each in sizes], [each.size for each in sizes], "o", color=BLUE)
    _from_zero(ax)
    _title(ax, "‖x~ − x‖ / ‖x‖")
    return figure


def _queries(found: Inspection) -> Figure | None:
    queries = [each for each in found.query_sizes if each.target == "query"]
    if not queries:
        return None
    figure, axes = panels(4, columns=2, width=5.5, height=max(2.5, _map_height(queries)))
    layers = [each.layer for each in queries]
    axes[0].plot(layers, [each.size for each in queries], "o", color=BLUE)
    _from_zero(axes[0])
    _title(axes[0], "‖f(x)‖ / ‖A(x)‖")
    axes[1].plot(layers, [each.cosine for each in queries], "s", color=VERMILLION)
    axes[1].axhline(0, color=MUTED, linewidth=0.8)
    _title(axes[1], "cosine of f(x) and A(x)")
    sizes = [(each.layer, head, size) for each in queries for head, size in enumerate(each.head_sizes)]
    _map(axes[2], sizes, lambda size: size, "‖f(x)‖ / ‖A(x)‖ by head", None)
    for index, each in enumerate(queries):
        axes[3].plot(each.position_sizes, color=shade(index, len(queries)), linewidth=1.2)
    axes[3].set_title("‖f(x)‖ / ‖A(x)‖ by position, a line a layer")
    axes[3].set_xlabel("position in the document")
    _from_zero(axes[3])
    return figure


def _explained(found: Inspection) -> Figure | None:
    if not found.linearised:
        return None
    figure, axes = panels(2, columns=2, width=5.5, height=2.7)
    for ax, name, title in (
        (axes[0], "explained", "share of the logits"),
        (axes[1], "explained_change", "share of what the patch changed"),
    ):
        points = [
            (each.layer, share) for each in found.linearised for share in getattr(each, name) if share is not None
        ]
        ax.plot([x for x, _ in points], [max(y, -0.05) for _, y in points], "o", color=BLUE, alpha=0.6, markersize=5)
        ax.set_ylim(-0.08, 1.05)
        _title(ax, f"{title} that is linear")
    return figure


def _ablations(found: Inspection) -> Figure | None:
    if found.ablations is None:
        return None
    each = found.ablations.without
    figure, (ax,) = panels(1, columns=1, width=7.0, height=0.9 + 0.24 * len(each))
    ys = range(len(each))
    ax.hlines(ys, [a.change - 1.96 * a.error for a in each], [a.change + 1.96 * a.error for a in each], color=BLUE)
    ax.plot([a.change for a in each], ys, "o", color=BLUE)
    ax.axvline(0, color=MUTED, linewidth=1.0)
    ax.set_yticks(ys, ["all" if a.layer is None else f"layer {a.layer}" for a in each], color=INK)
    ax.set_ylim(len(each) - 0.4, -0.6)
    ax.set_xlabel("change of the loss without it, nats a token; to the right: it was of use")
    return figure


DRAWINGS = (
    Drawing(
        "relation",
        "Q-K relation of each head",
        "At relative offset 0. Blue above, vermillion below what random weights have (0.5); the effective rank's scale "
        "is that of all heads.",
        _relation_map,
    ),
    Drawing(
        "offsets",
        "Q-K relation by relative offset",
        "B(Δ) = W_Q R(Δ) W_Kᵀ, the mean over heads, a line a layer, from the first (light) to the last (dark).",
        _offsets,
    ),
    Drawing("skips", "Content skips", "Left: in the weights. Right: on text, the mean over tokens.", _skips),
    Drawing(
        "pre-projections", "Pre-projections", "How far each moves its input, the mean over tokens.", _pre_projections
    ),
    Drawing("queries", "Nonlinear queries", "f beside its anchor A; lines from the first layer (light) on.", _queries),
    Drawing(
        "explained",
        "How linear the patched logits are",
        "A point a head: the share of the within-row variance of the logits, on text outside the fit, that a bilinear "
        "form of the attention's input explains. Shares below 0 stand at the bottom.",
        _explained,
    ),
    Drawing(
        "ablations",
        "One layer's injection taken out",
        "With 95 % intervals of the paired difference over documents.",
        _ablations,
    ),
)


def figures(found: Inspection) -> list[tuple[str, str, str, str]]:
    """Return the name, the title, the caption and the SVG document of each figure that can be drawn."""
    with report_style():
        drawn = [(each, each.draw(found)) for each in DRAWINGS]
        return [(each.name, each.title, each.caption, to_svg(figure)) for each, figure in drawn if figure is not None]


def _map(
    ax: Axes,
    cells: Sequence[tuple[int, int, object]],
    value: Callable[..., float],
    title: str,
    centre: float | None,
    limits: tuple[float, float] | None = None,
) -> None:
    """Draw a number for each layer (down) and head (across); blue and vermillion around ``centre`` if there is one."""
    layers, heads = max(layer for layer, *_ in cells) + 1, max(head for _, head, _ in cells) + 1
    grid = np.full((layers, heads), np.nan)
    for layer, head, held in cells:
        grid[layer, head] = value(held)
    low, high = (centre - 0.5, centre + 0.5) if centre is not None else limits or (None, None)
    colours = _RISING if centre is None else _DIVERGING
    mesh = ax.pcolormesh(grid, cmap=colours, vmin=low, vmax=high, edgecolor=PAPER, linewidth=0.8)
    ax.figure.colorbar(mesh, ax=ax, aspect=25).outline.set_visible(False)
    ax.set_title(title)
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    ax.invert_yaxis()
    ax.grid(visible=False)
    for axis, count in ((ax.xaxis, heads), (ax.yaxis, layers)):
        step = -(-count // 12)
        axis.set_ticks(np.arange(0, count, step) + 0.5, [str(i) for i in range(0, count, step)])


def _lines(
    ax: Axes, relations: Sequence[HeadRelation], value: Callable[[Relation, Relation], float], title: str
) -> None:
    layers = sorted({each.layer for each in relations})
    for index, layer in enumerate(layers):
        heads = [each for each in relations if each.layer == layer]
        offsets = sorted(heads[0].by_offset)
        means = [np.mean([value(each.by_offset[offset], each.here) for each in heads]) for offset in offsets]
        ax.plot(range(len(offsets)), means, color=shade(index, len(layers)), marker=_MARKERS[0], markersize=3)
        ax.set_xticks(range(len(offsets)), [str(offset) for offset in offsets])
    ax.set_title(title)
    ax.set_xlabel("relative offset Δ")


def _title(ax: Axes, title: str) -> None:
    ax.set_title(title)
    ax.set_xlabel("layer")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _from_zero(ax: Axes) -> None:
    ax.margins(y=0.12)
    ax.set_ylim(bottom=0)


def _map_height(rows: Sequence[object]) -> float:
    layers = len({getattr(each, "layer", 0) for each in rows})
    return min(6.0, 1.3 + 0.16 * layers)
