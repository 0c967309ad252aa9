"""The document of an inspection, for the terminal and for a page."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from types import MappingProxyType
from typing import Any

from hfpatch.analysis.inspection import Inspection
from hfpatch.analysis.relation import HeadRelation
from hfpatch.reporting import document as doc
from hfpatch.reporting.facts import gguf_text
from hfpatch.reporting.numbers import NOTHING, count, decimal, interval, short_count, signed, significant
from hfpatch.tuners.adapters import tensor_group

Columns = Mapping[str, Callable[[Any], str]]
"""Heading -> function from the item of a row to its cell."""
_SEGMENT = re.compile(r"(?<![^.])\d+(?![^.])")
"""The number of a block in the path of a module."""


def inspection_document(
    inspection: Inspection, figures: Mapping[str, doc.Figure] = MappingProxyType({})
) -> doc.Document:
    """Return the facts, a table for each analysis, and the analyses that are missing and why.

    ``figures`` are those of the page by name, see `hfpatch.reporting.inspection.figures`; a terminal shows none.
    """
    (added, without, training), linearised = _of_patch(inspection), _linear(inspection)
    relations, attention = _relations(inspection), _attention(inspection)
    notes = doc.Sentences(tuple(inspection.notes), title="What is not shown")
    base, summary, facts = inspection.base, inspection.summary, _facts(inspection)
    # the attention branches
    columns: Columns = {
        "family": lambda site: site.family,
        "attention": lambda site: _SEGMENT.sub("N", site.path),
        "query": lambda site: site.projections["query"].path if "query" in site.projections else NOTHING,
        "joins the residual as": lambda site: (
            "itself" if site.exit_path == site.path else _SEGMENT.sub("N", site.exit_path)
        ),
        "added": lambda site: count(summary.per_layer.get(site.layer, 0)),
    }
    caption = (
        "Paths are those of the model without a patch, N is the number of the layer; added: the patch's parameters, of "
        "each layer."
    )
    sites = {site.layer: site for site in inspection.sites}
    branches = _layer_table("branches", "Attention branches", sites, columns, caption)
    numbers = json.dumps(inspection.to_json())
    download = doc.Download("inspection.json", "All numbers as JSON", numbers, "application/json")
    of_patch = [*map(figures.get, ("skips", "pre-projections", "queries")), added, figures.get("ablations"), without]
    of_relation = [*map(figures.get, ("relation", "offsets")), *relations, figures.get("explained"), linearised]
    sections = []  # of the blocks that have something in them
    for name, title, blocks in (
        ("model", "Model", (doc.Facts(tuple(facts)), download, notes, branches)),
        ("patch", "Patch" if inspection.patch else "Nonlinear queries", (*of_patch, training)),
        ("on-text", "Attention on the text", (figures.get("attention"), *attention)),
        ("relation", "Queries and keys", of_relation),
    ):
        filled = (part for part in blocks if part is not None and getattr(part, "rows", getattr(part, "items", True)))
        sections.append(doc.Section(name, title, tuple(filled)))
    tables = (branches, added, *attention, *relations, linearised, without, training)
    return doc.Document(
        title=base.name,
        kind="inspection",
        glance=(
            ("Architecture", base.model.config.model_type),
            ("Parameters", short_count(summary.base)),
            ("Added", short_count(summary.added)),
        ),
        parts=(doc.Part(tuple(section for section in sections if section.blocks)),),
        summary=(doc.Facts(tuple(facts)), *(table for table in tables if table.rows), notes),
    )


def _facts(inspection: Inspection) -> list[doc.Fact]:
    base, summary, text = inspection.base, inspection.summary, inspection.text
    facts = [("Model", f"{base.name}, {base.model.config.model_type}, SHA-256 {base.sha256[:12]}")]
    if base.gguf is not None:
        facts.append(("Weights", gguf_text(base.gguf.facts)))
    if inspection.patch is not None:
        share = summary.added / max(summary.base, 1)
        facts.append(("Patch", f"{inspection.patch}, {share:.2%} of the base's parameters"))
    if text is not None:
        sizes = f"{count(text.tokens)} tokens of {count(text.documents)} documents"
        facts.append(("Measured on", f"{text.source}, {sizes}"))
    counts = f"{count(summary.base)} of the base, {count(summary.added)} added, {count(summary.trainable)} trainable"
    facts.append(("Parameters", counts))
    return facts


def _table(name: str, title: str, items: Iterable[Any], columns: Columns, caption: str) -> doc.Table:
    """Return a table with a row for each item."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return doc.Table.of(name, title, list(columns), rows, caption)


def _layer_table(name: str, title: str, items: Mapping[int, Any], columns: Columns, caption: str) -> doc.Table:
    """Return a table with a row for each layer of ``items``, neighbouring layers whose cells are equal in one."""
    cells = ((layer, tuple(cell(item) or NOTHING for cell in columns.values())) for layer, item in items.items())
    rows = []
    for same, group in groupby(cells, key=itemgetter(1)):
        layers = [layer for layer, _ in group]  # ascending: 0–29 where none is left out, else one by one
        in_a_row = len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1
        rows.append((f"{layers[0]}–{layers[-1]}" if in_a_row else ", ".join(map(str, layers)), *same))
    if len(rows) == 1 < len(items):
        caption = f"{len(items)} layers, all alike. {caption}"
    return doc.Table.of(name, title, ("layer", *columns), rows, caption)


def _attention(inspection: Inspection) -> list[doc.Table]:
    columns: Columns = {
        "on the first token": lambda heads: _spread(head.sink for head in heads),
        "entropy": lambda heads: _spread(head.entropy for head in heads),
        "tokens back": lambda heads: _spread((head.distance for head in heads), 1),
    }
    caption = (
        "Mean [least, most] over the heads of a layer, each the mean over the queries but a document's first. On the "
        "first token: the weight on the first token of the document (a sink where it is near 1); entropy: of the "
        "weights, in nats; tokens back: the mean distance of what is attended to."
    )
    bare, patched = _by_layer(inspection.attention), _by_layer(inspection.attention_patched)
    return [
        _layer_table("attention", "Attention on the text", bare, columns, caption),
        _layer_table("attention-patched", "Attention with the patch", patched, columns, "As above."),
    ]


def _of_patch(inspection: Inspection) -> tuple[doc.Table, doc.Table, doc.Table]:
    """Return the tables of what a patch adds, of the loss without one layer's adapters, and of its training."""
    skips, queries = _by_layer(inspection.skip_norms), _by_layer(inspection.query_sizes)
    moved, skip_sizes = _by_layer(inspection.pre_projection_sizes), _by_layer(inspection.skip_sizes)
    named = {size.target: "" if size.target == "query" else f"{size.target} " for size in inspection.query_sizes}
    columns: Columns = {
        "‖x~−x‖/‖x‖": lambda layer: ", ".join(_number(size.size) for size in moved[layer]),
        "‖W_skip‖": lambda layer: ", ".join(_number(skip.norm) for skip in skips[layer]),
        "1e-4·d": lambda layer: ", ".join(_number(skip.at_paper_init) for skip in skips[layer][:1]),
        "‖x~W_skip‖/‖attention‖": lambda layer: ", ".join(_number(size.size) for size in skip_sizes[layer]),
        "‖f‖/‖A‖": lambda layer: ", ".join(named[size.target] + _number(size.size) for size in queries[layer]),
        "cos(f, A)": lambda layer: ", ".join(named[size.target] + _number(size.cosine) for size in queries[layer]),
    }
    title = "What the patch adds" if inspection.patch else "What f adds to its anchor"
    caption = (
        'Means over tokens. Compare ‖W_skip‖ with 1e-4·d, the norm that init="paper" gives before any training. '
        "f is the nonlinear term of a query, A its anchor."
    )
    layers = sorted({*skips, *queries, *moved})
    added = _layer_table("added", title, dict(zip(layers, layers, strict=True)), columns, caption)
    # without one layer's adapters
    columns = {
        "without layer": lambda ablation: "all" if ablation.layer is None else str(ablation.layer),
        "loss": lambda ablation: decimal(ablation.score, 4),
        "change": lambda ablation: signed(ablation.change, 4),
        "±": lambda ablation: decimal(ablation.error, 4),
    }
    made = inspection.ablations
    caption = "" if made is None else (
        f"Nats per token, the mean over {made.items} documents; {made.score:.4f} with the whole patch. A rise means "
        "that the adapters were of use; ± is the standard error of the paired difference."
    )  # fmt: skip
    without = _table("without", "Without one layer's adapters", made.without if made else (), columns, caption)
    # its training, by kind of tensor
    changed = defaultdict(list)
    for movement in inspection.movement:
        changed[tensor_group(movement.tensor)].append(movement)
    kept = inspection.run.update_survival if inspection.run else {}
    weights = {group: sum(tensor.weights for tensor in tensors) for group, tensors in changed.items()}
    unmoved = {group: sum(tensor.unmoved for tensor in tensors) for group, tensors in changed.items()}
    columns = {
        "tensor": str,
        "weights": lambda group: count(weights[group]),
        "never moved": lambda group: f"{count(unmoved[group])} ({unmoved[group] / weights[group]:.1%})",
        "‖moved‖": lambda group: _number(math.hypot(*(tensor.distance for tensor in changed[group]))),
        "‖at start‖": lambda group: _number(math.hypot(*(tensor.before for tensor in changed[group]))),
        "updates kept": lambda group: f"{kept[group]:.1%}" if group in kept else NOTHING,
    }
    caption = (
        "By kind of tensor, all layers together. Never moved: the same, bit for bit, as at initialisation. Updates "
        "kept: the share of weights with a gradient that an optimiser step really changed, as the run recorded it."
    )
    training = _table("training", "Training", changed, columns, caption)
    return added, without, training


def _relations(inspection: Inspection) -> list[doc.Table]:
    """Return the tables without the patch, with it, and by offset.

    By offset is the patched relation where there is one, else the base's; that table has no rows without RoPE.
    """

    def signatures(heads: Sequence[HeadRelation]) -> str:
        pairs = sorted({(head.here.positive, head.here.negative) for head in heads})
        return ", ".join([*map(str, pairs[:2]), *(["…"] if len(pairs) > 2 else [])])

    columns: Columns = {
        "heads/key heads": lambda heads: f"{len(heads)}/{len({head.key_head for head in heads})}",
        "symmetric": lambda heads: _spread(head.here.symmetric for head in heads),
        "positive": lambda heads: _spread(head.here.positive_energy for head in heads),
        "signature": signatures,
        "effective rank of S": lambda heads: _spread((head.here.effective_rank for head in heads), 1),
    }
    caption = (
        "B = W_Q W_Kᵀ of each head, mean [least, most] over the heads of a layer, at relative offset 0. Symmetric: "
        "‖S‖²/‖B‖², 0.5 in random weights; positive: the share of ‖S‖² on positive eigenvalues; signature: how many "
        "are positive and negative, (k, k) wherever [W_Q W_K] has full rank."
    )
    bare, patched = _by_layer(inspection.relations), _by_layer(inspection.relations_patched)
    turned = inspection.relations_patched or inspection.relations
    offsets = sorted({offset for head in turned for offset in head.by_offset})
    shares: dict[int, dict[int, str]] = {}  # layer -> offset -> the mean over heads
    for layer, heads in _by_layer(turned if len(offsets) > 1 else ()).items():
        for offset in offsets:
            values = [head.by_offset[offset].symmetric for head in heads if offset in head.by_offset]
            shares.setdefault(layer, {})[offset] = decimal(fmean(values), 2) if values else NOTHING
    of_offsets: Columns = {f"Δ {offset}": itemgetter(offset) for offset in offsets}
    title = "Q-K relation by relative offset" + (", patched" if inspection.relations_patched else "")
    by_offset = "The symmetric share ‖S‖²/‖B‖² of B(Δ) = W_Q R(Δ) W_Kᵀ, the mean over heads, at each offset Δ."
    return [
        _layer_table("relations", "Q-K relation", bare, columns, caption),
        _layer_table("relations-patched", "Q-K relation with the patch", patched, columns, "As above."),
        _layer_table("by-offset", title, shares, of_offsets, by_offset),
    ]


def _linear(inspection: Inspection) -> doc.Table:
    """Return the table of the linear stand-in."""
    columns: Columns = {
        "logits explained": lambda fit: _spread(fit.explained, 3),
        "their change explained": lambda fit: _spread(fit.explained_change, 3),
        "tokens of the fit": lambda fit: count(fit.fit_tokens),
    }
    caption = (
        "Where the query is not linear, its Q-K relation is that of a ridge regression on real activations. Shares of "
        "the variance within the rows of the logit matrix, on other tokens than those of the fit; mean [least, most] "
        "over heads. Below 0 the fit is worse than none."
    )
    fits = {fit.layer: fit for fit in inspection.linearised}
    return _layer_table("linear", "Linear stand-in", fits, columns, caption)


def _by_layer(items: Iterable[Any]) -> Mapping[int, list[Any]]:
    """Group items by layer; the list of a layer without items is empty."""
    grouped = defaultdict(list)
    for item in sorted(items, key=lambda item: item.layer):
        grouped[item.layer].append(item)
    return grouped


def _spread(values: Iterable[float | None], digits: int = 2) -> str:
    """Return ``mean [least, most]`` of the finite values."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return NOTHING
    return f"{decimal(fmean(finite), digits)} {interval(min(finite), max(finite), digits)}"


def _number(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else significant(value, 3)
