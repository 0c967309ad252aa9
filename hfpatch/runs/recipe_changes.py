"""What a recipe may add to a folder that an earlier version of it made: methods, variants and seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from hfpatch.data.plan import BatchPlan, write_plans
from hfpatch.recipes import training as training_settings
from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe, load_pretrain_or_study
from hfpatch.recipes.strict import flatten
from hfpatch.recipes.tuning import tuning_seed
from hfpatch.support.files import read_json, write_json, write_text

AnyRecipe: TypeAlias = Recipe | PretrainRecipe | StudyRecipe
Changes: TypeAlias = dict[str, tuple[Any, Any]]
"""Dotted key of a recipe -> its value in the folder's recipe and in the one that is about to run."""

NOT_IDENTITY = {
    *("description", "data_dir", "evaluation.allow_unknown_base", "model.device_map", "model.trust_remote_code"),
    *(f"training.{key}" for key in training_settings.NOT_IDENTITY - {"seeds"}),
}
"""Keys of a recipe that may differ between a run and its continuation, with all that is below them: they change no
number, but for rounding."""
ABSENT = "absent"
_LIMIT = re.compile(r"evaluation\.(tasks\.[^.]+\.)?limit")


def changes(out: Path, recipe: AnyRecipe) -> tuple[Changes, Changes]:
    """Return how a recipe differs from that of a folder: what it adds, and what changes something that exists.

    More seeds are an addition, unless the trials of tuning would take place with another seed. So are labels, and all
    that is said about a method or a variant that has no run in the folder.

    Raises:
        HfpatchError: if the recipe in the folder cannot be read.
    """
    load = load_recipe if isinstance(recipe, Recipe) else load_pretrain_or_study
    old: AnyRecipe = load(out / "recipe.yaml", trust_code=True)  # to compare with; what it names is not run
    there, here = (flatten(each.model_dump(mode="json")) for each in (old, recipe))
    unrun = [name for name in {**_parts(old), **_parts(recipe)} if not (out / "runs" / name).exists()]
    added: Changes = {}
    changed: Changes = {}
    for key in [*there, *(key for key in here if key not in there)]:
        before, now = there.get(key, ABSENT), here.get(key, ABSENT)
        if before == now or any(key == name or key.startswith(f"{name}.") for name in NOT_IDENTITY):
            continue
        fits = _adds_seeds(recipe, before, now) if key in ("training.seeds", "seeds") else _is_about(key, unrun)
        if _LIMIT.fullmatch(key):
            fits = now is None or (ABSENT not in (before, now) and before is not None and before < now)
        (added if fits or key.startswith("labels.") else changed)[key] = (before, now)
    return added, changed


def adds_documents(added: Changes) -> bool:
    """Return whether tasks get more documents, so that what was scored is to be scored again."""
    return any(_LIMIT.fullmatch(key) for key in added)


def reopen(out: Path, recipe: AnyRecipe, plans: Mapping[int, BatchPlan], added: Changes) -> None:
    """Let a folder take what a recipe adds: its results are not complete any longer, and it has a plan for each seed.

    If it is killed in between, the next call does it again: the recipe is written last.
    """
    if adds_documents(added):
        for result in (out / "runs").glob("*/seed-*/result.json"):
            result.unlink()
    results = out / "results.json"
    if results.is_file():
        write_json(results, {**read_json(results), "complete": False})
    if plans:
        write_plans(out, plans)
    write_text(out / "recipe.yaml", recipe.to_yaml())


def _parts(recipe: AnyRecipe) -> Mapping[str, Any]:
    """Return what has a folder of its own below ``runs``: methods or variants."""
    if isinstance(recipe, PretrainRecipe):
        return {}
    return recipe.methods if isinstance(recipe, Recipe) else recipe.variants


def _adds_seeds(recipe: AnyRecipe, before: list[int], now: list[int]) -> bool:
    tunes = isinstance(recipe, Recipe) and recipe.tuning is not None
    return set(before) < set(now) and not (tunes and tuning_seed(before) != tuning_seed(now))


def _is_about(key: str, names: list[str]) -> bool:
    """Return whether a key is about one of these methods or variants alone."""
    start, _, rest = key.removeprefix("tuning.grid.").partition(".")
    return start in ("methods", "variants") and any(rest == name or rest.startswith(f"{name}.") for name in names)
