"""Budgets: every method with a size at several parameter counts, each of them a method called ``lora@10k``.

A recipe's ``budgets`` are replaced as it is read: ``lora`` becomes ``lora@10k``, with ``match: 10000`` in its part, and
so on. From then on these are methods like all others; their names show the family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from hfpatch.errors import nearest
from hfpatch.recipes.sizes import NO_SIZE, SIZES, has_open_size, share_of
from hfpatch.recipes.strict import shown

Budget = int | str
"""A number of parameters, or a share of the base's such as ``0.1%``."""
Parts = Sequence[Mapping[str, Any]]

TOLERANCE = 0.1
"""Share by which the nearest count may miss a budget; a method that misses it by more is left out there."""
_APART = 1.25  # of two budgets; above (1 + TOLERANCE) / (1 - TOLERANCE), so that one size never serves both
_MARK = "@"


def is_budget(value: object) -> bool:
    """Return whether a value of ``match`` or ``budgets`` is a budget: a positive whole number, or a share."""
    return share_of(value) is not None if isinstance(value, str) else type(value) is int and 0 < value < 10**18


def budget_text(budget: Budget) -> str:
    """Return the unique text of a budget in names: ``10k``, ``65.5k``, ``1.5M``, ``1234``, ``0.1%``."""
    if isinstance(budget, str):
        return f"{share_of(budget):g}%"
    unit, letter = (100_000, "M") if budget >= 1_000_000 and not budget % 100_000 else (100, "k")
    return f"{budget / (10 * unit):g}{letter}" if budget >= 1000 and not budget % unit else str(budget)


def budget_of(parts: Parts) -> str | None:
    """Return the budget that a method's size is solved for, as in names, or None."""
    return next((budget_text(part["match"]) for part in parts if is_budget(part.get("match"))), None)


def family_of(name: str) -> str:
    """Return a method's name without its budget: ``lora`` of ``lora@10k`` and of ``lora``."""
    return name.partition(_MARK)[0]


def budget_in(name: str) -> str:
    """Return the budget in a method's name: ``10k`` of ``lora@10k``, nothing of ``lora``."""
    return name.partition(_MARK)[2]


def points_of(family: str, methods: Mapping[str, Parts]) -> list[str]:
    """Return the names of a method's budgets, ascending."""
    points = {name: parts for name, parts in methods.items() if _MARK in name and family_of(name) == family}
    return sorted(points, key=lambda name: _order(next(part["match"] for part in points[name] if "match" in part)))


def with_points(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with each method that has a size replaced by one method for each of its budgets.

    A method has one if a part of it leaves its size open: neither the size nor ``match`` is given. ``budgets`` in that
    part are its own; an empty list leaves the method at its default size. Labels, and keys of the grid of tuning, are
    repeated for each budget.

    Raises:
        ValueError: if budgets are malformed, or it is not known which part they size.
    """
    methods, shared = values.get("methods"), values.get("budgets")
    rest = {key: value for key, value in values.items() if key != "budgets"}
    if not isinstance(methods, dict) or not all(
        isinstance(parts, list) and all(isinstance(part, dict) for part in parts) for parts in methods.values()
    ):
        return rest if not shared else dict(values)
    if not shared and not any("budgets" in part for parts in methods.values() for part in parts):
        return rest
    _check("budgets", shared or [])
    points = {name: _points(name, parts, shared or []) for name, parts in methods.items()}
    if not any(points.values()):
        raise ValueError("budgets: every method has a size; leave out the sizes that budgets set")
    made: dict[str, Any] = {}
    for name, parts in methods.items():
        bare = [{key: value for key, value in part.items() if key != "budgets"} for part in parts]
        for new, kept in (points[name] or {name: bare}).items():
            if new in made or (new != name and new in methods):
                raise ValueError(f"methods.{new} is given twice: by itself, and by the budgets of {name}")
            made[new] = kept
        if lost := next((part["match"] for part in bare if points.get(str(part.get("match")))), None):
            raise ValueError(f"methods.{name} has match: {lost}, which has several budgets; leave match out")

    # Labels, and keys of the grid of tuning, for each budget
    changed: dict[str, Any] = {**rest, "methods": made}
    if isinstance(labels := rest.get("labels"), dict):
        changed["labels"] = {
            new: label if new == name else f"{label}{new.removeprefix(name)}"
            for name, label in labels.items()
            for new in (points.get(name) or [name])
        }
    tuning = rest.get("tuning")
    if isinstance(tuning, dict) and isinstance(tuning.get("grid"), dict):
        grid: dict[str, Any] = {}
        for key, tried in tuning["grid"].items():
            owner = next((name for name in points if points[name] and key.startswith(f"methods.{name}.")), None)
            option = key.removeprefix(f"methods.{owner}")
            grid |= {key: tried} if owner is None else {f"methods.{new}{option}": tried for new in points[owner]}
        changed["tuning"] = {**tuning, "grid": grid}
    return changed


def _points(name: str, parts: Parts, shared: Sequence[Budget]) -> dict[str, list[dict[str, Any]]]:
    """Return the parts of a method at each of its budgets, by name; nothing where it keeps its size."""
    named = [index for index, part in enumerate(parts) if "budgets" in part]
    sized = named or [index for index, part in enumerate(parts) if shared and has_open_size(part) is not False]
    if len(sized) > 1:
        raise ValueError(
            f"methods.{name} has {len(sized)} parts without a size; budgets set one, so give the others theirs"
        )
    if not sized:
        return {}
    index, where = sized[0], f"methods.{name}.{sized[0]}"
    kind, budgets = str(parts[index].get("type")), parts[index].get("budgets", shared)
    if named:
        _check(f"{where}.budgets", budgets)
    elif has_open_size(parts[index]) is None:
        raise ValueError(
            f"{where}: hfpatch cannot tell whether {kind} has a size before loading it"
            f"{nearest(kind, [*SIZES, *NO_SIZE])}; add budgets: [...] to the part, or budgets: [] for its default size"
        )
    bare = {key: value for key, value in parts[index].items() if key != "budgets"}
    if budgets and kind in NO_SIZE:
        raise ValueError(f"{where}.budgets: {kind} has no size to solve for: it {NO_SIZE[kind]}; leave budgets out")
    keys = ("match", SIZES[kind].key) if kind in SIZES else ("match",)
    if budgets and (given := next((key for key in keys if key in bare), None)):
        raise ValueError(f"{where} has both {given} and budgets; leave one out")
    return {
        f"{name}{_MARK}{budget_text(budget)}": [
            *map(dict, parts[:index]),
            {**bare, "match": budget_text(budget) if isinstance(budget, str) else budget},
            *map(dict, parts[index + 1 :]),
        ]
        for budget in sorted(budgets, key=_order)
    }


def _check(where: str, budgets: Any) -> None:
    if not isinstance(budgets, list | tuple):
        raise ValueError(f"{where} is {shown(budgets)}; must be a list")
    if wrong := [budget for budget in budgets if not is_budget(budget)]:
        raise ValueError(
            f"{where} contains {shown(wrong[0])}; must be a number of parameters, such as 65_000, or a share of "
            "the base's, such as 0.1%"
        )
    if len({isinstance(budget, str) for budget in budgets}) > 1:
        raise ValueError(f"{where} mixes numbers of parameters and shares of the base's; use one of them")
    ordered = sorted(budgets, key=_order)
    if near := next(((one, two) for one, two in pairwise(ordered) if _order(two) < _APART * _order(one)), None):
        raise ValueError(f"{where} contains {near[0]} and {near[1]}; keep budgets a factor of {_APART} apart")


def _order(budget: Budget) -> float:
    """Return a number by which budgets of one kind are ordered."""
    return share_of(budget) or 0.0 if isinstance(budget, str) else float(budget)
