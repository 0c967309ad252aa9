"""What an inspection found as tables of text, for the terminal and for the page alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hfpatch.analysis.movement import Movement
from hfpatch.analysis.relation import HeadRelation, Relation
from hfpatch.analysis.reparametrisation import WHY_NOT
from hfpatch.runs.inspection import Inspection
from hfpatch.sites import AttentionSite
from hfpatch.training.survival import tensor_group

NOTHING = "–"


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        title: what it shows.
        caption: how to read it.
        headings: one a column; the first column names the row.
        rows: cells of text.
    """

    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def inspection_tables(found: Inspection) -> list[TextTable]:
    """Return the tables of all that was found, in the order in which to read them."""
    relations = (
        _relations(found, patched=False),
        _relations(found, patched=True),
        _by_offset(found),
        _linearised(found),
    )
    made = (_sites(found), _added(found), *relations, _ablations(found), _training(found), _reparametrisation(found))
    return [table for table in made if table is not None and table.rows]


def opening(found: Inspection) -> list[str]:
    """Return what was looked at, a fact a line."""
    base, summary = found.base, found.summary
    lines = [f"{base.name} · {base.model.config.model_type} · {summary.base:,} parameters · {base.sha256[:12]}"]
    if found.patch is not None:
        share = f"{summary.added / max(summary.base, 1):.2%}"
        lines.append(f"patch {found.patch}: {summary.added:,} parameters added ({share} of the base)")
    if found.text is not None:
        lines.append(
            f"measured on {found.text.tokens:,} tokens of {found.text.documents} documents: {found.text.source}"
        )
    return lines


def _sites(found: Inspection) -> TextTable:
    rows = [
        (str(site.layer), site.family, site.path, _query_path(site), _exit(site),
         f"{found.summary.per_layer.get(site.layer, 0):,}")
        for site in found.sites
    ]  # fmt: skip
    headings = ("layer", "family", "attention", "query", "joins the residual as", "added")
    return TextTable(
        "Attention branches",
        "Paths are those of the model without a patch; added: the patch's parameters.",
        headings,
        rows,
    )


def _query_path(site: AttentionSite) -> str:
    return site.projections["query"].path if "query" in site.projections else "-"


def _exit(site: AttentionSite) -> str:
    return "itself" if site.exit_path == site.path else site.exit_path


def _added(found: Inspection) -> TextTable | None:
    skip_sizes = {each.layer: each.size for each in found.skip_sizes}
    sizes = {each.layer: each.size for each in found.pre_projection_sizes}
    rows = []
    layers = {*sizes, *(norm.layer for norm in found.skip_norms), *(query.layer for query in found.query_sizes)}
    for layer in sorted(layers):
        skips = [each for each in found.skip_norms if each.layer == layer]
        queries = [each for each in found.query_sizes if each.layer == layer]
        rows.append(
            (
                str(layer),
                _number(sizes.get(layer)),
                ", ".join(_number(each.norm) for each in skips) or NOTHING,
                _number(skips[0].at_paper_init if skips else None),
                _number(skip_sizes.get(layer)),
                ", ".join(_query(each.target, each.size) for each in queries) or NOTHING,
                ", ".join(_query(each.target, each.cosine) for each in queries) or NOTHING,
            )
        )
    headings = ("layer", "‖x~−x‖/‖x‖", "‖W_skip‖", "1e-4·d", "‖x~W_skip‖/‖attention‖", "‖f‖/‖A‖", "cos(f, A)")
    caption = (
        'Means over tokens. ‖W_skip‖ must be read beside 1e-4·d, the norm that init="paper" gives before any training. '
        "f is the nonlinear term of a query, A its anchor."
    )
    return TextTable("What the patch adds" if found.patch else "What f adds to its anchor", caption, headings, rows)


def _query(target: str, value: float) -> str:
    return _number(value) if target == "query" else f"{target} {_number(value)}"


def _relations(found: Inspection, *, patched: bool) -> TextTable:
    relations = found.relations_patched if patched else found.relations
    rows = []
    for layer, heads in _by_layer(relations):
        keys = len({each.key_head for each in heads})
        rows.append((str(layer), f"{len(heads)}/{keys}", *_relation_cells([each.here for each in heads])))
    gauge = (
        "" if found.gauge is None else f" A random change of basis inside the heads moves them by {found.gauge:.0e}."
    )
    caption = (
        "B = W_Q W_Kᵀ of each head, mean [least, most] over the heads of a layer, at relative offset 0. Symmetric: "
        "‖S‖²/‖B‖², 0.5 in random weights; positive: the share of ‖S‖² on positive eigenvalues; signature: how many "
        "are positive and negative, (k, k) wherever [W_Q W_K] has full rank." + gauge
    )
    headings = ("layer", "heads/key heads", "symmetric", "positive", "signature", "effective rank of S")
    if patched:
        return TextTable("Q-K relation with the patch", "As above.", headings, rows)
    return TextTable("Q-K relation", caption, headings, rows)


def _by_offset(found: Inspection) -> TextTable | None:
    """The patched relation where there is one, else the base's, at every offset; None without RoPE."""
    relations = found.relations_patched or found.relations
    offsets = sorted({offset for each in relations for offset in each.by_offset})
    if len(offsets) < 2:
        return None
    rows = []
    for layer, heads in _by_layer(relations):
        turned = [
            [each.by_offset[offset].symmetric for each in heads if offset in each.by_offset] for offset in offsets
        ]
        rows.append((str(layer), *(f"{sum(held) / len(held):.2f}" if held else NOTHING for held in turned)))
    title = "Q-K relation by relative offset" + (", patched" if found.relations_patched else "")
    caption = "The symmetric share ‖S‖²/‖B‖² of B(Δ) = W_Q R(Δ) W_Kᵀ, the mean over heads, at each offset Δ."
    return TextTable(title, caption, ("layer", *(f"Δ {offset}" for offset in offsets)), rows)


def _relation_cells(relations: Sequence[Relation]) -> tuple[str, ...]:
    signatures = sorted({(each.positive, each.negative) for each in relations})
    told = ", ".join(f"({p}, {n})" for p, n in signatures[:2]) + (", …" if len(signatures) > 2 else "")
    shares = (_spread(getattr(each, name) for each in relations) for name in ("symmetric", "positive_energy"))
    return (*shares, told, _spread((each.effective_rank for each in relations), 1))


def _linearised(found: Inspection) -> TextTable:
    rows = [
        (str(each.layer), _spread(each.explained, 3),
         _spread((share for share in each.explained_change if share is not None), 3), f"{each.fit_tokens:,}")
        for each in found.linearised
    ]  # fmt: skip
    caption = (
        "Where the query is not linear, its Q-K relation is that of a ridge regression on real activations. Shares of "
        "the variance within the rows of the logit matrix, on other tokens than those of the fit; mean [least, most] "
        "over heads. Below 0 the stand-in is worse than none."
    )
    headings = ("layer", "logits explained", "their change explained", "tokens of the fit")
    return TextTable("Linear stand-in", caption, headings, rows)


def _ablations(found: Inspection) -> TextTable | None:
    if found.ablations is None:
        return None
    rows = [
        (_without(each.layer), f"{each.score:.4f}", f"{each.change:+.4f}", f"{each.error:.4f}")
        for each in found.ablations.without
    ]
    caption = (
        f"Nats a token, the mean over {found.ablations.items} documents; {found.ablations.score:.4f} with the whole "
        "patch. A rise means that the injection was of use; ± is the standard error of the paired difference."
    )
    return TextTable("One layer's injection taken out", caption, ("without layer", "loss", "change", "±"), rows)


def _without(layer: int | None) -> str:
    return "all" if layer is None else str(layer)


def _training(found: Inspection) -> TextTable | None:
    survival = found.run.update_survival if found.run else {}
    gradients = {each.tensor: each.gradient for each in found.gradients}
    names = [each.tensor for each in found.movement] or list(gradients)
    rows = []
    for group in dict.fromkeys(tensor_group(name) for name in names):
        moved = [each for each in found.movement if tensor_group(each.tensor) == group]
        pulls = [value for name, value in gradients.items() if tensor_group(name) == group]
        cells = _movement_cells(moved)
        gradient = _number(math.sqrt(sum(value**2 for value in pulls))) if pulls else NOTHING
        kept = f"{survival[group]:.1%}" if group in survival else NOTHING
        rows.append((group, *cells, gradient, kept))
    caption = (
        "By kind of tensor, all layers together. Never moved: the same, bit for bit, as at initialisation. Gradient: "
        "of the loss on the text at the weights as they are. Updates kept: the share of weights with a gradient that "
        "an optimiser step really changed, as the run recorded it."
    )
    headings = ("tensor", "weights", "never moved", "‖moved‖", "‖at start‖", "‖gradient‖", "updates kept")
    return TextTable("Training", caption, headings, rows)


def _movement_cells(moved: Sequence[Movement]) -> tuple[str, ...]:
    if not moved:
        return (NOTHING,) * 4
    count, unmoved = sum(each.weights for each in moved), sum(each.unmoved for each in moved)
    distance, before = (math.sqrt(sum(getattr(each, name) ** 2 for each in moved)) for name in ("distance", "before"))
    return f"{count:,}", f"{unmoved:,} ({unmoved / count:.1%})", _number(distance), _number(before)


def _reparametrisation(found: Inspection) -> TextTable | None:
    rows = [
        (
            str(each.layer),
            f"{each.invariance_error:.1e}" if each.invariance_error is not None else "-",
            f"{each.elimination_error:.1e}" if each.elimination_error is not None else each.obstacle,
            f"{each.removed:,}",
            _number(each.query_condition),
            _number(each.norm_error),
            _number(each.orthogonal_distance),
        )
        for each in found.reparametrisation
    ]
    caption = (
        "In fp64, relative to the output's largest value: the attention on XΘ with Θ⁻¹W_Q, Θ⁻¹W_K, Θ⁻¹W_V for a random "
        "Θ; and with Θ = W_Q, which leaves Q = X'. What stands in the way of converting the model: ‖norm(hΘ) − "
        "norm(h)Θ‖/‖norm(h)Θ‖ and W_Q's distance from orthogonal. " + WHY_NOT
    )
    headings = ("layer", "error, random Θ", "error, Θ = W_Q", "parameters removed", "condition of W_Q", "norm's error", "not orthogonal")  # noqa: E501  # fmt: skip
    return TextTable("Reparametrisation", caption, headings, rows)


def _by_layer(relations: Sequence[HeadRelation]) -> Iterator[tuple[int, list[HeadRelation]]]:
    for layer in sorted({each.layer for each in relations}):
        yield layer, [each for each in relations if each.layer == layer]


def _spread(values: Iterable[float], digits: int = 2) -> str:
    held = [value for value in values if math.isfinite(value)]
    if not held:
        return NOTHING
    mean = sum(held) / len(held)
    return f"{mean:.{digits}f} [{min(held):.{digits}f}, {max(held):.{digits}f}]"


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.3g}"
