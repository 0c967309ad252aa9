"""Which method is held against which."""

from __future__ import annotations

from typing import Any

from hfpatch.recipe import Recipe


def references(recipe: Recipe) -> dict[str, list[str]]:
    """Return what each method is held against: the baseline first, then the controls made for it.

    A control of a method is whatever matches its parameters (``match:``), the method named ``lora`` if nothing does,
    and, where the method is one nonlinear query, the linear one (``activation: identity``).
    """
    return {name: [recipe.baseline, *_controls(recipe, name)] for name in recipe.methods if name != recipe.baseline}


def _controls(recipe: Recipe, name: str) -> list[str]:
    if all(part["type"] == "lora" for part in recipe.methods[name]):
        return []  # plain LoRA is a control itself
    matching = _matching(recipe, name) or (["lora"] if "lora" in recipe.methods else [])
    return [*matching, *_linear_controls(recipe, name)]


def _matching(recipe: Recipe, name: str) -> list[str]:
    return [other for other, parts in recipe.methods.items() if any(part.get("match") == name for part in parts)]


def _linear_controls(recipe: Recipe, name: str) -> list[str]:
    if not _is_query(recipe.methods[name]) or _is_linear(recipe.methods[name]):
        return []
    return [other for other, parts in recipe.methods.items() if _is_query(parts) and _is_linear(parts)]


def _is_query(parts: list[dict[str, Any]]) -> bool:
    return len(parts) == 1 and parts[0]["type"] == "nonlinear_query"


def _is_linear(parts: list[dict[str, Any]]) -> bool:
    return bool(parts[0].get("activation") == "identity")
