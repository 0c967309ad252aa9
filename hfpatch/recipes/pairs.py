"""Which methods of a comparison are tested against which; what ``match`` makes comparable is decided here alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

from hfpatch.recipes.controls import LINEAR_QUERY, Parts, controls_of, has_its_budget, is_control, kind_of, targets_of

if TYPE_CHECKING:
    from hfpatch.recipes.comparison import Recipe


Question = Literal["base", "lora", "parts", "models", "retention"]
"""What a pair of methods is compared for; see :mod:`hfpatch.results.verdicts`."""


def references(recipe: Recipe) -> dict[str, list[str]]:
    """Return what each method is compared with: the baseline first, then methods of its size, then its controls.

    Methods of its size are, in this order:

    1. the methods that are matched to it (``match:``), and every LoRA of its match group: a method and all that are
       matched to it, or all of one budget (:func:`in_one_group`);
    2. of a nonlinear query, key or value the linear one of the same targets;
    3. where there is none of these, and it is not matched itself, the method named ``lora``.

    Controls keep one part of it alone (:func:`hfpatch.recipes.controls.controls_of`). What is a control itself is
    compared with the baseline and the LoRAs of its match group; a LoRA with the baseline alone, as the others are
    compared with it.
    """
    methods, controls = recipe.methods, controls_of(recipe.methods)
    anchors = {name: {str(part["match"]) for part in parts if "match" in part} for name, parts in methods.items()}
    loras = [name for name, parts in methods.items() if is_lora(parts)]
    found = {}
    for name, parts in methods.items():
        others = [lora for lora in loras if lora != name and in_one_group(anchors, name, lora)]
        if is_lora(parts):
            others = []
        elif not is_control(parts):
            others = [*(other for other in methods if name in anchors[other]), *others]
            if kind_of(parts) == "nonlinear_query":
                linear = [other for other, theirs in methods.items() if kind_of(theirs) == LINEAR_QUERY]
                alike = [other for other in linear if targets_of(methods[other]) == targets_of(parts)]
                others += [other for other in alike if has_its_budget(methods[other], parts)]
            if not others and "lora" in methods and not all("match" in part for part in parts):
                others = ["lora"]
            others += [control.name for control in controls.get(name, [])]
        if name != recipe.baseline:
            found[name] = [recipe.baseline, *dict.fromkeys(others)]
    return found


def left_out_of_pairs(whole: Recipe, some: Recipe) -> list[str]:
    """Return a sentence for each method of ``some`` whose comparisons with others of ``whole`` cannot be made."""
    wanted, made = references(whole), references(some)
    absent = {name: [other for other in wanted[name] if other not in some.methods] for name in made}
    return [
        f"{name} is not compared with {', '.join(others)}, which --methods leaves out"
        for name, others in absent.items()
        if others
    ]


def by_question(
    made: Collection[tuple[str, str]], baseline: str | None, loras: Collection[str]
) -> dict[Question, list[tuple[str, str]]]:
    """Return which pairs answer which question: with the baseline, with a LoRA, and all others.

    Args:
        made: each method with one that it is compared with.
        baseline: the base alone.
        loras: the methods that are LoRA and nothing else.
    """
    found: dict[Question, list[tuple[str, str]]] = {}
    for pair in made:
        question: Question = "base" if pair[1] == baseline else "lora" if pair[1] in loras else "parts"
        found.setdefault(question, []).append(pair)
    return found


def in_one_group(anchors: Mapping[str, Collection[str]], one: str, other: str) -> bool:
    """Return whether one method is matched to the other, or both are matched to a third or to one budget.

    Args:
        anchors: for each method those that its parts are matched to.
        one: a method.
        other: another one.
    """
    return not {one, *anchors[one]}.isdisjoint({other, *anchors[other]})


def is_lora(parts: Parts) -> bool:
    """Return whether a method is LoRA, of whatever variant, and nothing else."""
    return bool(parts) and all(part.get("type") == "lora" for part in parts)
