"""`inspect`: where a model's attention branches are, and what they do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from hfpatch.analysis.ablation import Ablations, ablate_layers, document_losses
from hfpatch.analysis.gradients import GradientNorm, gradient_norms
from hfpatch.analysis.heads import each_layers_weights
from hfpatch.analysis.linearised import Linearised, is_nonlinear, linearise
from hfpatch.analysis.movement import Movement, RunRecord, initial_tensors, movement, patch_tensors, read_run
from hfpatch.analysis.norms import (
    PreProjectionSize,
    QuerySize,
    SkipNorm,
    SkipSize,
    pre_projection_sizes,
    query_sizes,
    skip_norms,
    skip_sizes,
)
from hfpatch.analysis.relation import HeadRelation, gauge_deviation, head_relations
from hfpatch.analysis.reparametrisation import LayerReparametrisation, reparametrise
from hfpatch.analysis.running import Batch
from hfpatch.analysis.text import batches_of, token_rows
from hfpatch.data.corpora import documents
from hfpatch.errors import HfpatchError
from hfpatch.models.listening import paths_with_f
from hfpatch.recipes.comparison import ModelSettings
from hfpatch.recipes.data import DataSettings
from hfpatch.sites import AttentionSite, find_sites, survey
from hfpatch.surgery.bases import TINYWORLD, Base, load_base
from hfpatch.surgery.folder import load_patch
from hfpatch.surgery.patch import PatchSummary, patch_summary, stack
from hfpatch.tinyworld.tasks import items
from hfpatch.tuners.adapters import has_adapters

LENGTH = 256
"""The most tokens of one document that an inspection reads."""
LEAST_TOKENS = 2048
_SEED = re.compile(r"seed-(\d+)")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Text:
    """The text that an inspection measured on.

    Attributes:
        source: what was asked for.
        documents: how many were read, the head of each.
        tokens: how many tokens they hold.
    """

    source: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found; an analysis that could not be made is empty, and ``notes`` says why.

    Attributes:
        base: the model.
        patch: the patch's folder, or None.
        sites: where its attention branches are.
        summary: its parameters and what the patch adds.
        text: what was measured on, or None.
        relations: the Q-K relation of every head of the base.
        relations_patched: the same with the patch, its linear stand-in where the query is not linear.
        gauge: the largest relative change of the relations under a random change of gauge.
        skip_norms: of the content skips.
        skip_sizes: beside the attention's output, on the text.
        pre_projection_sizes: on the text.
        query_sizes: of the patch, or of a model pretrained with an f of its own, on the text.
        linearised: how much of the logits the linear stand-in explains, on the text.
        ablations: each layer's injection taken out in turn, nats a token on the text.
        gradients: of the patch's tensors, on the text.
        movement: how far the patch's tensors moved since their initialisation.
        run: what the folder of the patch's run tells, where it lies in one.
        reparametrisation: of each layer, where it was asked for.
        notes: one sentence each on what is not shown and why.
    """

    base: Base
    patch: Path | None
    sites: list[AttentionSite]
    summary: PatchSummary
    text: Text | None = None
    relations: list[HeadRelation] = field(default_factory=list)
    relations_patched: list[HeadRelation] = field(default_factory=list)
    gauge: float | None = None
    skip_norms: list[SkipNorm] = field(default_factory=list)
    skip_sizes: list[SkipSize] = field(default_factory=list)
    pre_projection_sizes: list[PreProjectionSize] = field(default_factory=list)
    query_sizes: list[QuerySize] = field(default_factory=list)
    linearised: list[Linearised] = field(default_factory=list)
    ablations: Ablations | None = None
    gradients: list[GradientNorm] = field(default_factory=list)
    movement: list[Movement] = field(default_factory=list)
    run: RunRecord | None = None
    reparametrisation: list[LayerReparametrisation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; what is not a number is null."""
        found = {name: getattr(self, name) for name in _AS_THEY_ARE}
        shares = ("layer", "explained", "explained_change", "fit_tokens")
        linearised = [{name: getattr(each, name) for name in shares} for each in self.linearised]
        plain: dict[str, Any] = _plain(
            {
                "model": {"name": self.base.name, "revision": self.base.revision, "sha256": self.base.sha256},
                "model_type": self.base.model.config.model_type,
                "patch": str(self.patch) if self.patch else None,
                "sites": [_site(site) for site in self.sites],
                "parameters": asdict(self.summary),
                **found,
                "linearised": linearised,
            }
        )
        return plain


_AS_THEY_ARE = (
    *("text", "relations", "relations_patched", "gauge", "skip_norms", "skip_sizes", "pre_projection_sizes"),
    *("query_sizes", "ablations", "gradients", "movement", "run", "reparametrisation", "notes"),
)


def inspect(
    model: ModelSettings,
    patch: Path | None,
    *,
    allow_other_base: bool = False,
    text: str | None = None,
    tokens: int | None = None,
    data_dir: Path | None = None,
    reparametrisation: bool = False,
) -> Inspection:
    """Look at a model's attention: its sites and parameters, the Q-K relation of every head, and what a patch does.

    Args:
        model: the base.
        patch: a folder that `save_patch` or PEFT wrote; inside a run folder the run's records are read too.
        allow_other_base: take a patch whose base had other weights.
        text: where the text to measure on comes from, as a recipe's ``data.source``; best one that the patch was not
            trained on. None takes that of tinyworld's tasks for tinyworld's models, and measures nothing for others.
        tokens: how many tokens of it; None takes eight times the hidden size, at least 2048.
        data_dir: a folder that holds local copies of hub data sets.
        reparametrisation: verify the invariance (X, W) -> (XΘ, Θ⁻¹W) too.

    Raises:
        HfpatchError: if the model, the patch or the text cannot be had, or the model's architecture is not declared.
    """
    base = load_base(model.name, revision=model.revision, dtype=model.dtype)
    seen = survey(base.model)
    sites = seen.sites
    source, texts = _texts(base, text, data_dir) or ("", [])
    rows = _rows(base, sites, texts, tokens) if source else []
    notes = [f"Block {layer} is no attention branch: {why}." for layer, why in seen.skipped.items()]
    # first: a patch that does not fit is refused at once
    moved = {} if patch is None else _moved(base, patch, allow_other_base, notes)
    found: dict[str, Any] = {"notes": notes, **moved, **_of_the_base(base, notes)}
    if reparametrisation:
        ids = batches_of(rows[:2])[0]["input_ids"] if rows else batches_of([list(range(3, 19))])[0]["input_ids"]
        found["reparametrisation"] = _try(notes, "Reparametrisation", lambda: reparametrise(base.model, ids))
    if patch is not None:
        load_patch(base.model, patch, allow_other_base=allow_other_base)
        found.update(_of_the_patch(base, rows, notes))
    elif paths_with_f(base.model):
        found.update(_of_own_queries(base, rows, notes))
    base.model.eval()
    told = Text(source, len(rows), sum(map(len, rows))) if rows else None
    return Inspection(base, patch, sites, patch_summary(base.model), told, **found)


def load_patched(model: ModelSettings, patch: Path | None) -> Base:
    """Load a base and put a saved patch into it, in evaluation mode.

    Raises:
        HfpatchError: if the model or the patch cannot be had.
    """
    base = load_base(model.name, revision=model.revision, dtype=model.dtype)
    if patch is not None:
        load_patch(base.model, patch)
    base.model.eval()
    return base


def _texts(base: Base, source: str | None, data_dir: Path | None) -> tuple[str, Iterable[str]] | None:
    """Return what the text is called and the text; tinyworld's own is one that nothing is trained on."""
    if source is not None:
        return source, documents(DataSettings(source=source), data_dir=data_dir)
    if base.name.startswith(TINYWORLD):
        return "tinyworld_text", (item["text"] for item in items("text"))
    return None


def _rows(base: Base, sites: Sequence[AttentionSite], texts: Iterable[str], tokens: int | None) -> list[list[int]]:
    wanted = tokens or max(LEAST_TOKENS, 8 * sites[0].hidden_size)
    config = base.model.config.get_text_config()
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    return token_rows(texts, base.tokenizer, tokens=wanted, length=length)


def _try(notes: list[str], what: str, make: Callable[[], list[Found]]) -> list[Found]:
    """Make one analysis; where the model does not allow it, note why and go on."""
    try:
        return make()
    except HfpatchError as error:
        notes.append(f"{what}: not shown; {error}.")
        return []


def _of_the_base(base: Base, notes: list[str]) -> dict[str, Any]:
    deviations = []

    def relations() -> list[HeadRelation]:
        found = []
        for layer in each_layers_weights(base.model):
            found += head_relations(base.model, [layer])
            deviations.append(gauge_deviation(base.model, layer))
        return found

    return {"relations": _try(notes, "Q-K relation", relations), "gauge": max(deviations, default=None)}


def _moved(base: Base, patch: Path, allow_other_base: bool, notes: list[str]) -> dict[str, Any]:
    """Hold a saved patch against its own initialisation, and read the run that it lies in."""
    seed = _SEED.fullmatch(patch.resolve().parent.name)
    first = initial_tensors(base.model, patch, seed=int(seed[1]) if seed else None, allow_other_base=allow_other_base)
    last = patch_tensors(base.model, patch, allow_other_base=allow_other_base)
    if unknown := sorted(last.keys() - first.keys()):
        notes.append(
            f"Movement: {len(unknown)} tensors not shown; the seed of their initialisation is not known (it is that "
            "of the run, read from the folder name seed-N)."
        )
    folder = patch.resolve().parent
    in_run = any((folder / name).is_file() for name in ("training.json", "metrics.jsonl"))
    return {
        "movement": movement(first, {name: last[name] for name in first}),
        "run": read_run(folder) if in_run else None,
    }


def _of_the_patch(base: Base, rows: list[list[int]], notes: list[str]) -> dict[str, Any]:
    model = base.model
    found: dict[str, Any] = {"skip_norms": skip_norms(model)}
    if not rows:
        notes.append("Sizes on text, the linear stand-in, ablations and gradients: not shown; give text with --text.")
    if not has_adapters(model) or not stack(model):
        return found
    pad = int(base.tokenizer.pad_token_id or 0)
    fit, held_out = (batches_of(part, pad=pad) for part in (rows[::2], rows[1::2]))
    if rows:
        found["linearised"] = _try(notes, "Linear stand-in", lambda: linearise(model, fit, held_out))
        found.update(_on_text(model, held_out))
    found["relations_patched"] = _relations_patched(model, found.get("linearised", []), notes)
    return found


def _of_own_queries(base: Base, rows: list[list[int]], notes: list[str]) -> dict[str, Any]:
    """Measure the f that a model was pretrained with."""
    if any(not isinstance(each.path.f, nn.Linear) for each in paths_with_f(base.model)):
        notes.append("Q-K relation: the nonlinear f that the model was pretrained with counts as 0 there.")
    if not rows:
        notes.append("‖f‖/‖A‖: not shown; give text with --text.")
        return {}
    return {"query_sizes": query_sizes(base.model, batches_of(rows, pad=int(base.tokenizer.pad_token_id or 0)))}


def _on_text(model: Any, batches: list[Batch]) -> dict[str, Any]:
    return {
        "skip_sizes": skip_sizes(model, batches),
        "pre_projection_sizes": pre_projection_sizes(model, batches),
        "query_sizes": query_sizes(model, batches),
        "ablations": ablate_layers(model, lambda scored: document_losses(scored, batches)),
        "gradients": gradient_norms(model, batches),
    }


def _relations_patched(model: Any, fitted: list[Linearised], notes: list[str]) -> list[HeadRelation]:
    """Return the relations with the patch: the fit's where the query is not linear, else those of the matrices."""
    stand_ins = {each.layer: each.weights for each in fitted}
    nonlinear = {site.layer for site in find_sites(model) if is_nonlinear(site)}
    missing = nonlinear - stand_ins.keys()
    if missing:
        notes.append(f"Q-K relation with the patch: not shown for {len(missing)} layers whose query is not linear.")
    kept = (stand_ins.get(each.layer, each) for each in each_layers_weights(model) if each.layer not in missing)
    return _try(notes, "Q-K relation with the patch", lambda: head_relations(model, kept))


def _site(site: AttentionSite) -> dict[str, Any]:
    paths = {target: projection.path for target, projection in site.projections.items()}
    return {"layer": site.layer, "family": site.family, "attention": site.path, **paths, "exit": site.exit_path}


def _plain(value: Any) -> Any:
    """Return JSON values: dataclasses as mappings, keys as text, NaN and infinities as null."""
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
