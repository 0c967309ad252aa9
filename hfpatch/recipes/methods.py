"""The section ``methods`` of a recipe: the names of methods, their parts and labels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.budgets import Parts, budget_of, family_of, is_budget
from hfpatch.recipes.sizes import NO_SIZE, SIZES
from hfpatch.recipes.strict import check_names

_LONGEST_LABEL = 40


def check_methods(methods: Mapping[str, Parts], baseline: str) -> None:
    """Refuse a mistake in the names of methods or in their parts; options of parts are checked where they are used."""
    check_names(*map(family_of, methods))
    for name, parts in methods.items():
        if name != family_of(name) and name != f"{family_of(name)}@{budget_of(parts)}":
            raise HfpatchError(
                f"the name {name!r}: the part after @ must be the budget in match, such as @10k for match: 10000"
            )
    if baseline not in methods:
        hint = nearest(baseline, methods) or f"; add '{baseline}: []'"
        raise HfpatchError(f"baseline is {baseline!r}, which is not among methods{hint}")
    if methods[baseline]:
        raise HfpatchError(f"methods.{baseline} is the baseline and must be [], the unchanged model")
    for name, parts in methods.items():
        if not parts and name != baseline:
            raise HfpatchError(
                f"methods.{name} has no part, which makes it a second baseline; give it one or remove it"
            )
        for index, part in enumerate(parts):
            where = f"methods.{name}.{index}"
            if "type" not in part:
                kinds = "pre_projection, lora, another method of hfpatch or PEFT, or module:Class"
                raise HfpatchError(f"{where} has no type; write type: {kinds}")
            check_match(where, name, part, methods)


def check_chosen(chosen: Collection[str], methods: Collection[str], baseline: str | None, name: str) -> None:
    """Refuse a choice of none of the methods of the recipe ``name``, or of one that it does not have."""
    names = [method for method in methods if method != baseline] or [*methods]
    choices = f"; there {'are' if len(names) > 1 else 'is'} {', '.join(names)}"
    if not chosen:
        raise HfpatchError(f"--methods names no method of {name}{choices}")
    for wrong in [method for method in chosen if method not in methods]:
        raise HfpatchError(f"--methods: no method {wrong!r} in {name}{nearest(wrong, methods) or choices}")


def check_labels(labels: Mapping[str, str], methods: Mapping[str, Parts]) -> None:
    """Refuse a label without a method, one that is not a single short line, and one that two methods share."""
    shown = {name: name for name in methods if name not in labels}
    for name, label in labels.items():
        if name not in methods:
            raise HfpatchError(f"labels.{name} names no method{nearest(name, methods)}")
        if not label.strip() or not label.isprintable() or len(label) > _LONGEST_LABEL:
            raise HfpatchError(f"labels.{name} is {label!r}; must be a line of 1 to {_LONGEST_LABEL} characters")
        if label in shown:
            raise HfpatchError(
                f"labels.{name} is {label!r}, which {shown[label]} is called too; give each method its own"
            )
        shown[label] = name


def check_match(where: str, name: str, part: Mapping[str, Any], methods: Mapping[str, Parts]) -> None:
    """Refuse a mistake in ``match`` in a part of the method ``name``; ``where`` is the part."""
    if "match" not in part:
        return
    target, others = part["match"], [other for other, parts in methods.items() if parts and other != name]
    kind = str(part["type"])
    if kind in NO_SIZE:
        raise HfpatchError(f"{where}.match: {kind} has no size to solve for: it {NO_SIZE[kind]}; leave match out")
    if kind in SIZES and SIZES[kind].key in part:  # other types cannot be injected and are refused for that
        raise HfpatchError(f"{where} has both {SIZES[kind].key} and match; match finds {SIZES[kind].key}")
    if is_budget(target):
        return
    if target is None:
        raise HfpatchError(f"{where}.match is null, which is no size; leave it out, or write the part without it")
    if not isinstance(target, str) or target not in methods:
        raise HfpatchError(
            f"{where}.match is {target!r}, which is not among methods{nearest(str(target), others)}, nor a number of "
            "parameters, nor a share of the base's such as 0.1%"
        )
    if target not in others:
        raise HfpatchError(f"{where}.match is {target!r}; a method can match neither itself nor the baseline")
    if any("match" in other for other in methods[target]):
        raise HfpatchError(f"{where}.match is {target!r}, which matches another method itself; match that one")
