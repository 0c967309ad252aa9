"""`check` and `inspect`: what one model promises, and where its attention branches are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfpatch.bases import Base, load_base
from hfpatch.methods import build_method, validate_methods
from hfpatch.patch_files import load_patch
from hfpatch.patching import PatchSummary, patch_summary
from hfpatch.promises import CheckReport
from hfpatch.promises import check as run_promises
from hfpatch.recipe import ModelSettings
from hfpatch.sites import AttentionSite, find_sites


def check(model: ModelSettings, part: dict[str, Any]) -> CheckReport:
    """Run the promises on a model with one part, as a recipe writes it.

    Raises:
        HfpatchError: if the model cannot be had, or the part does not fit it.
    """
    methods = {"checked": [part]}
    validate_methods(methods)
    base = load_patched(model, None)
    report = run_promises(base.model, build_method(base.model, methods, "checked").configs[0])
    return replace(report, model=model.name)


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
