"""The results of ``hfpatch inspect`` as plain data, for reports and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hfpatch.analysis.ablation import Ablations
from hfpatch.analysis.attention import HeadAttention
from hfpatch.analysis.linearised import Linearised
from hfpatch.analysis.movement import Movement
from hfpatch.analysis.norms import LayerSize, QuerySize, SkipNorm
from hfpatch.analysis.relation import HeadRelation
from hfpatch.results.parts import TrainResult
from hfpatch.sites import AttentionSite
from hfpatch.support.files import json_value
from hfpatch.surgery.bases import Base
from hfpatch.surgery.patch import PatchSummary


@dataclass(frozen=True)
class Text:
    """The source of the text that an inspection measured on, with the number of documents and tokens read of it."""

    source: str
    documents: int
    tokens: int


@dataclass
class Inspection:
    """The results of `inspect`; an analysis that was not possible is empty, and ``notes`` gives the reason.

    Attributes:
        base: the model.
        patch: the patch's folder, or None.
        sites: the model's attention branches.
        summary: the parameters of the model and of the patch.
        text: the text on which everything from ``attention`` to ``ablations`` was measured, or None.
        relations: of every head of the base.
        relations_patched: with the patch, of its linear approximation where the query is not linear.
        attention: of every head of the base.
        attention_patched: with the patch.
        skip_norms, skip_sizes, pre_projection_sizes: of the patch.
        query_sizes: of the patch, or of a model pretrained with an f of its own.
        linearised: the share of the logits that the linear approximation explains.
        ablations: with each layer's adapters disabled in turn, in nats per token.
        movement: of the patch's tensors since their initialisation.
        run: the outcome of the patch's training, if the patch is in a run folder.
        notes: a sentence for each missing analysis, with the reason.
    """

    base: Base
    patch: Path | None
    sites: list[AttentionSite]
    summary: PatchSummary
    text: Text | None = None
    relations: list[HeadRelation] = field(default_factory=list)
    relations_patched: list[HeadRelation] = field(default_factory=list)
    attention: list[HeadAttention] = field(default_factory=list)
    attention_patched: list[HeadAttention] = field(default_factory=list)
    skip_norms: list[SkipNorm] = field(default_factory=list)
    skip_sizes: list[LayerSize] = field(default_factory=list)
    pre_projection_sizes: list[LayerSize] = field(default_factory=list)
    query_sizes: list[QuerySize] = field(default_factory=list)
    linearised: list[Linearised] = field(default_factory=list)
    ablations: Ablations | None = None
    movement: list[Movement] = field(default_factory=list)
    run: TrainResult | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; NaN and infinite numbers are null."""
        differently = ("base", "patch", "sites", "summary", "linearised", "run")
        names = [entry.name for entry in fields(self) if entry.name not in differently]
        shares = ("layer", "explained", "explained_change", "fit_tokens")  # not the fitted matrices
        sites = [
            {"layer": site.layer, "family": site.family, "attention": site.path}
            | {target: projection.path for target, projection in site.projections.items()}
            | {"exit": site.exit_path}
            for site in self.sites
        ]
        values = {
            "model": {"name": self.base.name, "revision": self.base.revision, "sha256": self.base.sha256},
            "model_type": self.base.model.config.model_type,
            "patch": str(self.patch) if self.patch else None,
            "sites": sites,
            "parameters": self.summary,
            **{name: getattr(self, name) for name in names},
            "linearised": [{name: getattr(layer, name) for name in shares} for layer in self.linearised],
            "run": self.run and self.run.to_json(),
        }
        return {name: json_value(value) for name, value in values.items()}
