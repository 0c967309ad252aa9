"""The figures of an inspection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its parts are imported where they are first used
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hfpatch.reporting import document as doc
from hfpatch.reporting import plots
from hfpatch.reporting.theme import BLUE, GREY, MUTED, VERMILLION, report_style, to_svg

if TYPE_CHECKING:
    from hfpatch.analysis.ablation import Ablations
    from hfpatch.analysis.inspection import Inspection
    from hfpatch.analysis.relation import HeadRelation


@report_style()
def figures(inspection: Inspection) -> dict[str, doc.Figure]:
    """Return a figure for each analysis that was made, by its name."""
    return {
        name: doc.Figure(name, title, f"{title}. {caption}", to_svg(figure))
        for name, title, caption, figure in _drawn(inspection)
    }


def _drawn(inspection: Inspection) -> Iterator[tuple[str, str, str, Figure]]:
    yield from _head_maps(inspection)
    relations = inspection.relations_patched or inspection.relations
    if turning := [head for head in relations if len(head.by_offset) > 1]:  # layers without RoPE do not turn
        caption = (
            "B(Δ) = W_Q R(Δ) W_Kᵀ, the mean over heads, a line a layer, from the first (light) to the last (dark)."
        )
        yield "offsets", "Q-K relation by relative offset", caption, _offsets(turning)
    if inspection.skip_norms:
        figure, axes = plots.panels(2 if inspection.skip_sizes else 1, columns=2, width=5.5, height=2.7)
        _by_layer(axes[0], "‖W_skip‖", inspection.skip_norms, "norm", from_zero=False, label="learned")
        start: dict[str, Any] = {"marker": "_", "color": GREY, "markersize": 12, "label": "at the paper's init, 1e-4·d"}
        _by_layer(axes[0], "‖W_skip‖", inspection.skip_norms, "at_paper_init", **start)
        axes[0].legend()
        if inspection.skip_sizes:
            _by_layer(axes[1], "‖x~W_skip‖ / ‖attention output‖", inspection.skip_sizes, "size")
        yield "skips", "Content skips", "Left: in the weights. Right: on text, the mean over tokens.", figure
    if inspection.pre_projection_sizes:
        figure, (ax,) = plots.panels(1, columns=1, width=5.5, height=2.6)
        _by_layer(ax, "‖x~ − x‖ / ‖x‖", inspection.pre_projection_sizes, "size")
        yield "pre-projections", "Pre-projections", "How far each moves its input, the mean over tokens.", figure
    if queries := [query for query in inspection.query_sizes if query.target == "query"]:
        figure, axes = plots.panels(2, columns=2, width=5.5, height=2.7)
        _by_layer(axes[0], "‖f(x)‖ / ‖A(x)‖", queries, "size")
        _by_layer(axes[1], "cosine of f(x) and A(x)", queries, "cosine", from_zero=False, color=VERMILLION)
        axes[1].axhline(0, color=MUTED, linewidth=0.8)
        yield "queries", "Nonlinear queries", "f beside its anchor A, the mean over tokens.", figure
    if inspection.linearised:
        caption = (
            "A point a head: the share of the within-row variance of the logits, on text outside the fit, that a "
            "bilinear form of the attention's input explains. Shares below 0 are drawn at the bottom."
        )
        figure, axes = plots.panels(2, columns=2, width=5.5, height=2.7)
        parts = (("explained", "the logits"), ("explained_change", "what the patch changed"))
        for ax, (name, what) in zip(axes, parts, strict=True):
            shares = [(fit.layer, share) for fit in inspection.linearised for share in getattr(fit, name)]
            points = [(layer, max(share, -0.05)) for layer, share in shares if share is not None]
            ax.plot([x for x, _ in points], [y for _, y in points], "o", color=BLUE, alpha=0.6, markersize=5)
            ax.set(title=f"share of {what} that is linear", ylim=(-0.08, 1.05))
            plots.integer_axis(ax, "layer", 10)
        yield "explained", "How linear the patched logits are", caption, figure
    if inspection.ablations is not None:
        caption = "With 95 % intervals of the paired difference over documents."
        yield "ablations", "One layer's injection taken out", caption, _ablations(inspection.ablations)


def _head_maps(inspection: Inspection) -> Iterator[tuple[str, str, str, Figure]]:
    """Yield the figures with a cell for each head."""
    if inspection.attention:
        caption = (
            "Of each head, means over the queries of the text but a document's first: the weight on the document's "
            "first token, the entropy of the weights in nats, and how many tokens back they lie."
        )
        heads = [*inspection.attention, *inspection.attention_patched]
        figure = _maps(
            (inspection.attention, inspection.attention_patched),
            ("sink", "weight on the first token", (0.0, 1.0), False),
            ("entropy", "entropy, nats", (0.0, max(head.entropy for head in heads)), False),
            ("distance", "tokens back", (0.0, max(head.distance for head in heads)), False),
        )
        yield "attention", "Attention of each head on the text", caption, figure
    if inspection.relations:
        caption = (
            "At relative offset 0. Blue above, vermillion below what random weights have (0.5); the effective rank's "
            "scale is that of all heads."
        )
        ranks = [head.here.effective_rank for head in (*inspection.relations, *inspection.relations_patched)]
        figure = _maps(
            (inspection.relations, inspection.relations_patched),
            ("here.symmetric", "symmetric share", (0.0, 1.0), True),
            ("here.positive_energy", "positive share", (0.0, 1.0), True),
            ("here.effective_rank", "effective rank", (min(ranks), max(ranks)), False),
        )
        yield "relation", "Q-K relation of each head", caption, figure


def _maps(rows: Sequence[Sequence[Any]], *panels: tuple[str, str, tuple[float, float], bool]) -> Figure:
    """Draw the ``rows`` of each head, of the base and below it with the patch, on the same scales.

    A panel has an attribute, a title, the limits of its colours, and whether values below the middle have their own.
    """
    rows = [heads for heads in rows if heads]
    width, height = len(panels), min(6.0, 1.3 + 0.16 * len({head.layer for head in rows[0]}))
    figure, axes = plots.panels(width * len(rows), columns=width, width=3.7, height=height)
    for i, ax in enumerate(axes):
        name, title, limits, diverging = panels[i % width]
        cells = [(head.layer, head.head, attrgetter(name)(head)) for head in rows[i // width]]
        plots.heat_map(ax, cells, limits=limits, diverging=diverging)
        ax.set_title(title + (", with the patch" if i >= width else ""))
    return figure


def _offsets(relations: Sequence[HeadRelation]) -> Figure:
    figure, axes = plots.panels(3, columns=3, width=3.7, height=2.7)
    offsets = sorted(relations[0].by_offset)
    by_layer = [[head for head in relations if head.layer == layer] for layer in sorted({r.layer for r in relations})]
    for ax, name, title in (
        (axes[0], "symmetric", "symmetric share"),
        (axes[1], "positive_energy", "positive share"),
        (axes[2], "norm", "‖B(Δ)‖ / ‖B(0)‖"),
    ):
        lines = []
        for heads in by_layer:
            values = np.array([[getattr(head.by_offset[offset], name) for offset in offsets] for head in heads])
            if name == "norm":
                first = np.array([[head.here.norm or np.nan] for head in heads])
                values = values / first
            lines.append((range(len(offsets)), values.mean(axis=0)))
        plots.layer_lines(ax, lines, marker="o", markersize=3)
        ax.set_xticks(range(len(offsets)), [str(offset) for offset in offsets])
        ax.set(title=title, xlabel="relative offset Δ")
        ax.ticklabel_format(axis="y", useOffset=False)
    for ax in axes[:2]:
        ax.axhline(0.5, color=MUTED, linewidth=0.8)
    return figure


def _ablations(ablations: Ablations) -> Figure:
    without = ablations.without
    figure, (ax,) = plots.panels(1, columns=1, width=7.0, height=0.9 + 0.24 * len(without))
    ys, changes = range(len(without)), np.array([ablation.change for ablation in without])
    half = scipy.special.stdtrit(ablations.items - 1, 0.975) * np.array([ablation.error for ablation in without])
    ax.hlines(ys, changes - half, changes + half, color=BLUE)
    ax.plot(changes, ys, "o", color=BLUE)
    ax.axvline(0, color=MUTED, linewidth=1.0)
    plots.named_rows(ax, ["all" if ablation.layer is None else f"layer {ablation.layer}" for ablation in without])
    ax.set_xlabel("change of the loss without it, nats a token; to the right: it was of use")
    return figure


def _by_layer(ax: Axes, title: str, rows: Sequence[Any], name: str, *, from_zero: bool = True, **look: Any) -> None:
    """Draw the attribute ``name`` of each row as a mark at its layer."""
    look = {"marker": "o", "color": BLUE, **look}
    ax.plot([row.layer for row in rows], [getattr(row, name) for row in rows], linestyle="none", **look)
    ax.set_title(title)
    plots.integer_axis(ax, "layer", 10)
    if from_zero:
        top = 1.12 * ax.dataLim.ymax
        ax.set_ylim(0, top if top > 0 else None)
