"""Which method is compared with which."""

from __future__ import annotations

from typing import Any

from hfpatch.recipes.comparison import Recipe


def references(recipe: Recipe) -> dict[str, list[str]]:
    """Return what each method is compared with: the baseline first, then the controls made for it.

    The controls of a method are the LoRAs that match its parameters (``match:``) and, where the method is one nonlinear
    query, the linear one (``activation: identity``); where there are none, the method named ``lora``. Controls are held
    against the baseline alone.
    """
    return {name: [recipe.baseline, *_controls(recipe, name)] for name in recipe.methods if name != recipe.baseline}


def _controls(recipe: Recipe, name: str) -> list[str]:
    parts = recipe.methods[name]
    if all(part["type"] == "lora" for part in parts) or _is_linear_query(parts):
        return []
    made = [*_matching(recipe, name), *_linear_controls(recipe, name)]
    return made or (["lora"] if "lora" in recipe.methods else [])


def _matching(recipe: Recipe, name: str) -> list[str]:
    return [other for other, parts in recipe.methods.items() if any(part.get("match") == name for part in parts)]


def _linear_controls(recipe: Recipe, name: str) -> list[str]:
    if not _is_query(recipe.methods[name]):
        return []
    return [other for other, parts in recipe.methods.items() if _is_linear_query(parts)]


def _is_query(parts: list[dict[str, Any]]) -> bool:
    return len(parts) == 1 and parts[0]["type"] == "nonlinear_query"


def _is_linear_query(parts: list[dict[str, Any]]) -> bool:
    return _is_query(parts) and parts[0].get("activation") == "identity"
