"""The figures of an inspection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its parts are imported where they are first used
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hfpatch.reporting import plots
from hfpatch.reporting.theme import BLUE, GREY, MUTED, VERMILLION, report_style, to_svg

if TYPE_CHECKING:
    from hfpatch.analysis.ablation import Ablations
    from hfpatch.analysis.inspection import Inspection
    from hfpatch.analysis.relation import HeadRelation


@report_style()
def figures(found: Inspection) -> list[tuple[str, str, str, str]]:
    """Return a figure for each analysis that was made: name, title, how to read it, and the SVG document."""
    return [(name, title, caption, to_svg(figure)) for name, title, caption, figure in _drawn(found)]


def _drawn(found: Inspection) -> Iterator[tuple[str, str, str, Figure]]:
    relations = found.relations_patched or found.relations
    queries = [each for each in found.query_sizes if each.target == "query"]
    if found.attention:
        caption = (
            "Of each head, means over the queries of the text but a document's first: the weight on the document's "
            "first token, the entropy of the weights in nats, and how many tokens back they lie."
        )
        yield "attention", "Attention of each head on the text", caption, _attention(found)
    if found.relations:
        caption = (
            "At relative offset 0. Blue above, vermillion below what random weights have (0.5); the effective rank's "
            "scale is that of all heads."
        )
        yield "relation", "Q-K relation of each head", caption, _relation(found)
    if turning := [each for each in relations if len(each.by_offset) > 1]:  # layers without RoPE do not turn
        caption = (
            "B(Δ) = W_Q R(Δ) W_Kᵀ, the mean over heads, a line a layer, from the first (light) to the last (dark)."
        )
        yield "offsets", "Q-K relation by relative offset", caption, _offsets(turning)
    if found.skip_norms:
        caption = "Left: in the weights. Right: on text, the mean over tokens."
        yield "skips", "Content skips", caption, _skips(found)
    if found.pre_projection_sizes:
        figure, (ax,) = plots.panels(1, columns=1, width=5.5, height=2.6)
        _by_layer(ax, "‖x~ − x‖ / ‖x‖", found.pre_projection_sizes, "size")
        yield "pre-projections", "Pre-projections", "How far each moves its input, the mean over tokens.", figure
    if queries:
        caption = "f beside its anchor A; lines from the first layer (light) on."
        yield "queries", "Nonlinear queries", caption, _queries(queries)
    if found.linearised:
        caption = (
            "A point a head: the share of the within-row variance of the logits, on text outside the fit, that a "
            "bilinear form of the attention's input explains. Shares below 0 are drawn at the bottom."
        )
        yield "explained", "How linear the patched logits are", caption, _explained(found)
    if found.ablations is not None:
        caption = "With 95 % intervals of the paired difference over documents."
        yield "ablations", "One layer's injection taken out", caption, _ablations(found.ablations)


def _attention(found: Inspection) -> Figure:
    """Draw what each head attends to, of the base and below it with the patch, on the same scales."""
    rows = [heads for heads in (found.attention, found.attention_patched) if heads]
    figure, axes = plots.panels(3 * len(rows), columns=3, width=3.7, height=_map_height(found.attention))
    panels = (("sink", "weight on the first token"), ("entropy", "entropy, nats"), ("distance", "tokens back"))
    for i, ax in enumerate(axes):
        name, title = panels[i % 3]
        most = max(getattr(each, name) for heads in rows for each in heads)
        cells = [(each.layer, each.head, getattr(each, name)) for each in rows[i // 3]]
        plots.heat_map(ax, _grid(cells), limits=(0.0, 1.0 if name == "sink" else most))
        ax.set_title(title + (", with the patch" if i >= 3 else ""))
    return figure


def _relation(found: Inspection) -> Figure:
    """Draw the relation of each head, of the base and below it with the patch."""
    rows = [relations for relations in (found.relations, found.relations_patched) if relations]
    figure, axes = plots.panels(3 * len(rows), columns=3, width=3.7, height=_map_height(found.relations))
    ranks = [each.here.effective_rank for relations in rows for each in relations]
    for i, ax in enumerate(axes):
        name, title = (
            ("symmetric", "symmetric share"),
            ("positive_energy", "positive share"),
            ("effective_rank", "effective rank"),
        )[i % 3]
        cells = [(each.layer, each.head, getattr(each.here, name)) for each in rows[i // 3]]
        limits = (0.0, 1.0) if i % 3 < 2 else (min(ranks), max(ranks))
        plots.heat_map(ax, _grid(cells), limits=limits, diverging=i % 3 < 2)
        ax.set_title(title + (", with the patch" if i >= 3 else ""))
    return figure


def _offsets(relations: Sequence[HeadRelation]) -> Figure:
    figure, axes = plots.panels(3, columns=3, width=3.7, height=2.7)
    offsets = sorted(relations[0].by_offset)
    by_layer = [[each for each in relations if each.layer == layer] for layer in sorted({r.layer for r in relations})]
    for ax, name, title in (
        (axes[0], "symmetric", "symmetric share"),
        (axes[1], "positive_energy", "positive share"),
        (axes[2], "norm", "‖B(Δ)‖ / ‖B(0)‖"),
    ):
        lines = []
        for heads in by_layer:
            values = np.array([[getattr(each.by_offset[offset], name) for offset in offsets] for each in heads])
            if name == "norm":
                first = np.array([[each.here.norm or np.nan] for each in heads])
                values = values / first
            lines.append((range(len(offsets)), values.mean(axis=0)))
        plots.layer_lines(ax, lines, marker="o", markersize=3)
        ax.set_xticks(range(len(offsets)), [str(offset) for offset in offsets])
        ax.set(title=title, xlabel="relative offset Δ")
        ax.ticklabel_format(axis="y", useOffset=False)
    for ax in axes[:2]:
        ax.axhline(0.5, color=MUTED, linewidth=0.8)
    return figure


def _skips(found: Inspection) -> Figure:
    figure, axes = plots.panels(2 if found.skip_sizes else 1, columns=2, width=5.5, height=2.7)
    _by_layer(axes[0], "‖W_skip‖", found.skip_norms, "norm", from_zero=False, label="learned")
    start: dict[str, Any] = {"marker": "_", "color": GREY, "markersize": 12, "label": "at the paper's init, 1e-4·d"}
    _by_layer(axes[0], "‖W_skip‖", found.skip_norms, "at_paper_init", **start)
    axes[0].legend()
    if found.skip_sizes:
        _by_layer(axes[1], "‖x~W_skip‖ / ‖attention output‖", found.skip_sizes, "size")
    return figure


def _queries(queries: Sequence[Any]) -> Figure:
    """Draw the size of f beside its anchor by layer, head and position, and their cosine."""
    figure, axes = plots.panels(4, columns=2, width=5.5, height=max(2.5, _map_height(queries)))
    _by_layer(axes[0], "‖f(x)‖ / ‖A(x)‖", queries, "size")
    _by_layer(axes[1], "cosine of f(x) and A(x)", queries, "cosine", from_zero=False, marker="s", color=VERMILLION)
    axes[1].axhline(0, color=MUTED, linewidth=0.8)
    cells = [(each.layer, head, size) for each in queries for head, size in enumerate(each.head_sizes)]
    plots.heat_map(axes[2], _grid(cells))
    axes[2].set_title("‖f(x)‖ / ‖A(x)‖ by head")
    lines = [(range(len(each.position_sizes)), each.position_sizes) for each in queries]
    plots.layer_lines(axes[3], lines, linewidth=1.2)
    axes[3].set(title="‖f(x)‖ / ‖A(x)‖ by position, a line a layer", xlabel="position in the document")
    _from_zero(axes[3])
    return figure


def _explained(found: Inspection) -> Figure:
    figure, axes = plots.panels(2, columns=2, width=5.5, height=2.7)
    for ax, name, what in zip(
        axes, ("explained", "explained_change"), ("the logits", "what the patch changed"), strict=True
    ):
        points = [
            (each.layer, share) for each in found.linearised for share in getattr(each, name) if share is not None
        ]
        ax.plot([x for x, _ in points], [max(y, -0.05) for _, y in points], "o", color=BLUE, alpha=0.6, markersize=5)
        ax.set(title=f"share of {what} that is linear", ylim=(-0.08, 1.05))
        plots.integer_axis(ax, "layer", 10)
    return figure


def _ablations(found: Ablations) -> Figure:
    without = found.without
    figure, (ax,) = plots.panels(1, columns=1, width=7.0, height=0.9 + 0.24 * len(without))
    ys, changes = range(len(without)), np.array([each.change for each in without])
    half = scipy.special.stdtrit(found.items - 1, 0.975) * np.array([each.error for each in without])
    ax.hlines(ys, changes - half, changes + half, color=BLUE)
    ax.plot(changes, ys, "o", color=BLUE)
    ax.axvline(0, color=MUTED, linewidth=1.0)
    plots.named_rows(ax, ["all" if each.layer is None else f"layer {each.layer}" for each in without])
    ax.set_xlabel("change of the loss without it, nats a token; to the right: it was of use")
    return figure


def _by_layer(ax: Axes, title: str, rows: Sequence[Any], name: str, *, from_zero: bool = True, **look: Any) -> None:
    """Draw the attribute ``name`` of each row as a mark at its layer."""
    look = {"marker": "o", "color": BLUE, **look}
    ax.plot([row.layer for row in rows], [getattr(row, name) for row in rows], linestyle="none", **look)
    ax.set_title(title)
    plots.integer_axis(ax, "layer", 10)
    if from_zero:
        _from_zero(ax)


def _from_zero(ax: Axes) -> None:
    top = 1.12 * ax.dataLim.ymax
    ax.set_ylim(0, top if top > 0 else None)


def _grid(cells: Sequence[tuple[int, int, float]]) -> plots.Floats:
    """Return layers x heads; NaN where a layer or head is not there."""
    grid = np.full((1 + max(layer for layer, *_ in cells), 1 + max(head for _, head, _ in cells)), np.nan)
    for layer, head, value in cells:
        grid[layer, head] = value
    return grid


def _map_height(rows: Sequence[Any]) -> float:
    return min(6.0, 1.3 + 0.16 * len({each.layer for each in rows}))
