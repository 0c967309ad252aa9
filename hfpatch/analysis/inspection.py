"""The results of ``hfpatch inspect`` as plain data, for reports and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hfpatch.analysis.ablation import Ablations
from hfpatch.analysis.attention import HeadAttention
from hfpatch.analysis.gradients import GradientNorm
from hfpatch.analysis.linearised import Linearised
from hfpatch.analysis.movement import Movement, RunRecord
from hfpatch.analysis.norms import LayerSize, QuerySize, SkipNorm
from hfpatch.analysis.relation import HeadRelation
from hfpatch.analysis.reparametrisation import LayerReparametrisation
from hfpatch.sites import AttentionSite
from hfpatch.surgery.bases import Base
from hfpatch.surgery.patch import PatchSummary


@dataclass(frozen=True)
class Text:
    """The text that an inspection measured on.

    Attributes:
        source: the requested source.
        documents: how many were read, the beginning of each.
        tokens: how many tokens they have.
    """

    source: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class Inspection:
    """The results of `inspect`; an analysis that could not be made is empty, and ``notes`` gives the reason.

    Attributes:
        base: the model.
        patch: the patch's folder, or None.
        sites: where its attention branches are.
        summary: its parameters and those of the patch.
        text: the text of the measurements, or None.
        relations: the Q-K relation of every head of the base.
        relations_patched: the same with the patch, its linear approximation where the query is not linear.
        attention: the attention weights of every head of the base, on the text.
        attention_patched: the same with the patch.
        gauge: the largest relative change of the relations under a random change of gauge.
        skip_norms: of the content skips.
        skip_sizes: relative to the attention's output, on the text.
        pre_projection_sizes: on the text.
        query_sizes: of the patch, or of a model pretrained with an f of its own, on the text.
        linearised: how much of the logits the linear approximation explains, on the text.
        ablations: each layer's injection removed in turn, nats per token on the text.
        gradients: of the patch's tensors, on the text.
        movement: how far the patch's tensors moved since their initialisation.
        run: the records of the patch's run, if the patch is in a run folder.
        reparametrisation: of each layer, where it was asked for.
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
    gauge: float | None = None
    skip_norms: list[SkipNorm] = field(default_factory=list)
    skip_sizes: list[LayerSize] = field(default_factory=list)
    pre_projection_sizes: list[LayerSize] = field(default_factory=list)
    query_sizes: list[QuerySize] = field(default_factory=list)
    linearised: list[Linearised] = field(default_factory=list)
    ablations: Ablations | None = None
    gradients: list[GradientNorm] = field(default_factory=list)
    movement: list[Movement] = field(default_factory=list)
    run: RunRecord | None = None
    reparametrisation: list[LayerReparametrisation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; NaN and infinite numbers are null."""
        differently = ("base", "patch", "sites", "summary", "linearised")
        names = [each.name for each in fields(self) if each.name not in differently]
        shares = ("layer", "explained", "explained_change", "fit_tokens")  # not the fitted matrices
        plain: dict[str, Any] = _plain(
            {
                "model": {"name": self.base.name, "revision": self.base.revision, "sha256": self.base.sha256},
                "model_type": self.base.model.config.model_type,
                "patch": str(self.patch) if self.patch else None,
                "sites": [
                    {
                        "layer": site.layer,
                        "family": site.family,
                        "attention": site.path,
                        **{target: projection.path for target, projection in site.projections.items()},
                        "exit": site.exit_path,
                    }
                    for site in self.sites
                ],
                "parameters": self.summary,
                **{name: getattr(self, name) for name in names},
                "linearised": [{name: getattr(each, name) for name in shares} for each in self.linearised],
            }
        )
        return plain


def _plain(value: Any) -> Any:
    """Return JSON values: dataclasses as mappings, keys as text, NaN and infinities as null."""
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
