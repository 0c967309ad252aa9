"""`inspect`: a model's attention branches, and the effect of a patch on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from hfpatch.analysis.ablation import ablate_layers, document_losses
from hfpatch.analysis.attention import head_attention
from hfpatch.analysis.heads import layer_weights, norm_gains
from hfpatch.analysis.inspection import Inspection, Text
from hfpatch.analysis.linearised import is_nonlinear, linearise
from hfpatch.analysis.movement import initial_tensors, movement, patch_tensors
from hfpatch.analysis.norms import pre_projection_sizes, query_sizes, skip_norms, skip_sizes
from hfpatch.analysis.relation import head_relations
from hfpatch.analysis.text import batches_of, token_rows
from hfpatch.data.corpora import documents
from hfpatch.errors import HfpatchError
from hfpatch.models.paths import query_paths_with_f
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.strict import validate
from hfpatch.results.parts import TrainResult
from hfpatch.sites import find_sites, survey
from hfpatch.sites.heads import normed
from hfpatch.support.files import read_json
from hfpatch.surgery.bases import TINYWORLD, Base, load_base, require_causal
from hfpatch.surgery.folder import load_patch
from hfpatch.surgery.patch import patch_summary
from hfpatch.tinyworld.tasks import items
from hfpatch.tuners.adapters import has_adapters, stack

LENGTH = 256
"""The most tokens of one document that an inspection reads."""
LEAST_TOKENS = 2048
_SEED = re.compile(r"seed-(\d+)")


def inspect(
    model: ModelSettings,
    patch: str | Path | None,
    *,
    allow_other_base: bool = False,
    text: str | None = None,
    tokens: int | None = None,
    data_dir: str | Path | None = None,
) -> Inspection:
    """Look at a model's attention: its sites and parameters, the Q-K relation of every head, and the effect of a patch.

    Args:
        model: the base.
        patch: a folder that `save_patch` or PEFT wrote; inside a run folder the outcome of its training is read too.
        allow_other_base: take a patch whose base had other weights.
        text: where the text to measure on comes from, as a recipe's ``data.source``; best one that the patch was not
            trained on. None takes that of tinyworld's tasks for tinyworld's models, and measures nothing for others.
        tokens: how many tokens of it; None takes eight times the hidden size, at least 2048.
        data_dir: a folder that holds local copies of hub data sets.

    Raises:
        HfpatchError: if the model, the patch or the text cannot be loaded, or the model's architecture is not declared.
    """
    patch, data_dir = (None if path is None else Path(path) for path in (patch, data_dir))
    if tokens is not None and text is None and not model.name.startswith(TINYWORLD):
        raise HfpatchError(f"--tokens {tokens}: counts tokens of a text, and there is none; give text with --text")
    base = load_base(model.name, **model.loading)
    require_causal(base.model, model.name)
    surveyed = survey(base.model)
    source, rows = _rows(base, surveyed.sites[0].hidden_size, text, tokens, data_dir)
    batches = batches_of(rows, pad=int(base.tokenizer.pad_token_id or 0))
    notes = [f"Block {layer} is no attention branch: {why}." for layer, why in surveyed.skipped.items()]
    inspection = Inspection(base, patch, surveyed.sites, patch_summary(base.model), notes=notes)
    if rows:
        inspection.text = Text(source, len(rows), sum(map(len, rows)))
    if patch is not None:  # first, as one that does not fit is refused at once
        _inspect_training(inspection, patch, allow_other_base=allow_other_base)
    _inspect_base(inspection)
    with _noted(notes, "Attention on the text"):
        inspection.attention = head_attention(base.model, batches) if rows else []
    if patch is not None:
        load_patch(base.model, patch, allow_other_base=allow_other_base)
        inspection.summary = patch_summary(base.model)
        _inspect_patch(inspection, rows)
        with _noted(notes, "Attention on the text"):
            inspection.attention_patched = head_attention(base.model, batches) if rows else []
    elif queries := query_paths_with_f(base.model):
        if any(not isinstance(query.path.f, nn.Linear) for query in queries):
            notes.append("Q-K relation: the nonlinear f that the model was pretrained with counts as 0 there.")
        if rows:
            inspection.query_sizes = query_sizes(base.model, batches)
        else:
            notes.append("‖f‖/‖A‖: not shown; give text with --text.")
    base.model.eval()
    return inspection


def _rows(
    base: Base, hidden_size: int, source: str | None, tokens: int | None, data_dir: Path | None
) -> tuple[str, list[list[int]]]:
    """Return the name of the text and its tokens; tinyworld's own text is not trained on."""
    texts: Iterable[str]
    if source is not None:
        texts = documents(DataSettings(source=source), data_dir=data_dir)
    elif base.name.startswith(TINYWORLD):
        source, texts = "tinyworld_text", (item["text"] for item in items("text"))
    else:
        return "", []
    config = base.model.config.get_text_config()
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    wanted = tokens or max(LEAST_TOKENS, 8 * hidden_size)
    return source, token_rows(texts, base.tokenizer, tokens=wanted, length=length)


@contextmanager
def _noted(notes: list[str], what: str) -> Iterator[None]:
    """Where the model does not allow an analysis, note why and continue."""
    try:
        yield
    except HfpatchError as error:
        notes.append(f"{what}: not shown; {error}.")


def _inspect_training(inspection: Inspection, patch: Path, *, allow_other_base: bool) -> None:
    """Compare a patch with its own initialisation, and read the outcome of its training."""
    base, folder = inspection.base, patch.resolve().parent
    seed = int(name[1]) if (name := _SEED.fullmatch(folder.name)) else None
    first = initial_tensors(base.model, patch, seed=seed, allow_other_base=allow_other_base)
    last = patch_tensors(base.model, patch, allow_other_base=allow_other_base)
    if unknown := last.keys() - first.keys():
        inspection.notes.append(
            f"Movement: {len(unknown)} tensors not shown; the seed of their initialisation is not known (it is that of "
            "the run, read from the folder name seed-N)."
        )
    inspection.movement = movement(first, {name: last[name] for name in first})
    if (outcome := folder / "training.json").is_file():
        with _noted(inspection.notes, "Training"):
            inspection.run = validate(read_json(outcome), TrainResult, str(outcome))


def _inspect_base(inspection: Inspection) -> None:
    """Measure the relation of queries and keys."""
    base, notes = inspection.base, inspection.notes
    with _noted(notes, "Q-K relation"):
        inspection.relations = head_relations(base.model, map(layer_weights, find_sites(base.model)))
    behind = [site for site in find_sites(base.model) if normed(site.attention, site.heads)]
    if inspection.relations and behind:
        folded = all(norm_gains(site) is not None for site in behind)
        rest = "the division by their size" if folded else "the norms (B stands before them)"
        gains = "; the norms' gains are: B = W_Q diag(g_Q) R(Δ) diag(g_K) W_Kᵀ" if folded else ""
        notes.append(f"Q-K relation: queries and keys are normed behind W_Q and W_K, and {rest} is not in B{gains}.")


def _inspect_patch(inspection: Inspection, rows: list[list[int]]) -> None:
    """Measure a patch that the base has; on text, where there are rows of it."""
    base, model, notes = inspection.base, inspection.base.model, inspection.notes
    inspection.skip_norms = skip_norms(model)
    if not rows:
        notes.append("Sizes on text, the linear stand-in and ablations: not shown; give text with --text.")
    if not has_adapters(model) or not stack(model):
        return
    if rows:
        pad = int(base.tokenizer.pad_token_id or 0)
        fit, held_out = batches_of(rows[::2], pad=pad), batches_of(rows[1::2], pad=pad)
        with _noted(notes, "Linear stand-in"):
            inspection.linearised = linearise(model, fit, held_out)
        with _noted(notes, "Sizes of content skips on the text"):
            inspection.skip_sizes = skip_sizes(model, held_out)
        with _noted(notes, "Sizes of pre-projections on the text"):
            inspection.pre_projection_sizes = pre_projection_sizes(model, held_out)
        with _noted(notes, "Sizes of nonlinear terms on the text"):
            inspection.query_sizes = query_sizes(model, held_out)
        inspection.ablations = ablate_layers(model, lambda scored: document_losses(scored, held_out))
    # the relations with the patch: the fit's where the query is not linear, else those of the matrices
    fits = {fit.layer: fit.weights for fit in inspection.linearised}
    missing = {site.layer for site in find_sites(model) if is_nonlinear(site)} - fits.keys()
    if missing:
        notes.append(f"Q-K relation with the patch: not shown for {len(missing)} layers whose query is not linear.")
    kept = (fits.get(site.layer) or layer_weights(site) for site in find_sites(model) if site.layer not in missing)
    with _noted(notes, "Q-K relation with the patch"):
        inspection.relations_patched = head_relations(model, kept)
