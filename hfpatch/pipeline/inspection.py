"""`inspect`: where a model's attention branches are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hfpatch.bases import Base, load_base
from hfpatch.patch_files import load_patch
from hfpatch.patching import PatchSummary, patch_summary
from hfpatch.recipe import ModelSettings
from hfpatch.sites import AttentionSite, find_sites


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        base: the model.
        sites: where its attention branches are.
        summary: its parameters and what the patch adds.
    """

    base: Base
    sites: list[AttentionSite]
    summary: PatchSummary


def inspect(model: ModelSettings, patch: Path | None) -> Inspection:
    """Find a model's attention sites and count its parameters.

    Raises:
        HfpatchError: if the model or the patch cannot be had, or its architecture is not declared.
    """
    base = load_patched(model, patch)
    return Inspection(base, find_sites(base.model), patch_summary(base.model))


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
