"""Which methods of a comparison are tested against which: methods of one size (``match``), and their controls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

from hfpatch.recipes.budgets import Parts, budget_in, budget_of, points_of
from hfpatch.recipes.questions import QuestionSettings

Question = Literal["base", "lora", "parts", "models", "retention"]
"""The question that a pair of methods answers; see :mod:`hfpatch.results.verdicts`."""

SKIP_ALONE = "the skip alone"
LINEAR_PRE_PROJECTION = "the linear pre-projection"
LINEAR_QUERY = "the linear query"
QUERY_TEMPERATURE = "the query temperature"
NO_SKIP = "the pre-projection without the skip"
LINEAR_NO_SKIP = "the linear pre-projection without the skip"
OF_SAME_SIZE = (LINEAR_PRE_PROJECTION, LINEAR_QUERY)
"""The parts whose controls should have as many parameters as their method."""
CONTROLS = (SKIP_ALONE, LINEAR_PRE_PROJECTION, LINEAR_QUERY, QUERY_TEMPERATURE)
"""The parts that a control keeps by its form alone, see :func:`kind_of`."""


class Compared(Protocol):
    """What of a recipe decides its pairs."""

    @property
    def methods(self) -> Mapping[str, Parts]:
        """The parts of each method; none of variants that are trained from scratch."""

    @property
    def baseline(self) -> str:
        """The method that all others are compared with."""

    @property
    def questions(self) -> QuestionSettings:
        """The primary questions."""


def controls_of(methods: Mapping[str, Parts]) -> dict[str, dict[str, str]]:
    """Return the controls of every method that has any, each with the part of the method that it keeps alone, in words.

    A control shows where the method's effect comes from. Both are in the order of the methods.

    ====================================  ==========================================================================
    a method that is one                  its controls
    ====================================  ==========================================================================
    nonlinear pre-projection              a linear one (``activation: identity``) without a skip
    the same with a content skip          linear ones, the skip alone (``expansion: 0``), the one without the skip
    nonlinear query, key or value         a linear one (``activation: identity``) of its form and targets
    nonlinear query or key                the query temperature
    ====================================  ==========================================================================

    One budget of a method has the controls of that budget and controls without a budget.
    """
    by_method: dict[str, dict[str, str]] = {}
    for method, parts in methods.items():
        ours = kind_of(parts)
        with_skip = ours == "pre_projection" and bool(parts[0].get("content_skip"))
        for name, other in methods.items():
            kind = kind_of(other)
            keeps: str | None = None
            if ours == "nonlinear_query" and kind == QUERY_TEMPERATURE and targets_of(parts) != {"value"}:
                keeps = kind
            elif ours == "nonlinear_query" and kind == LINEAR_QUERY:
                forms = [query[0].get("form", "preserving") for query in (parts, other)]
                keeps = kind if forms[0] == forms[1] and targets_of(other) == targets_of(parts) else None
            elif ours == "pre_projection" and kind == LINEAR_PRE_PROJECTION and not other[0].get("content_skip"):
                keeps = LINEAR_NO_SKIP if with_skip else kind
            elif with_skip and kind in (SKIP_ALONE, LINEAR_PRE_PROJECTION):
                keeps = kind
            elif with_skip and kind == ours and other[0] == {k: v for k, v in parts[0].items() if k != "content_skip"}:
                keeps = NO_SKIP
            if keeps is not None and budget_of(other) in (None, budget_of(parts)):
                by_method.setdefault(method, {})[name] = keeps
    return by_method


def targets_of(parts: Parts) -> set[str]:
    """Return which of query, key and value a nonlinear query of one part changes, in a recipe that may be wrong."""
    targets = parts[0].get("targets", "query")
    return set(map(str, targets if isinstance(targets, list | tuple | set) else [targets]))


def kind_of(parts: Parts) -> str | None:
    """Return the type of a method of one part, or the part that it keeps as a control; None for a stack."""
    if len(parts) != 1:
        return None
    part, kind = parts[0], str(parts[0].get("type"))
    is_linear = part.get("activation") == "identity" and not part.get("gated")
    if kind == "pre_projection" and part.get("expansion") == 0:
        return SKIP_ALONE
    if kind == "query_temperature":
        return QUERY_TEMPERATURE
    linear = {"pre_projection": LINEAR_PRE_PROJECTION, "nonlinear_query": LINEAR_QUERY}
    return linear.get(kind, kind) if is_linear else kind


def references(recipe: Compared) -> dict[str, list[str]]:
    """Return the methods that each method is compared with: the baseline, then methods of its size, then its controls.

    Methods of its size are, in this order:

    1. the methods that are matched to it (``match:``), and every LoRA of its match group: a method and all that are
       matched to it, or all of one budget (:func:`in_one_group`);
    2. of a nonlinear query, key or value the linear one of the same targets;
    3. where there is none of these, and it is not matched itself, the method named ``lora``.

    A control itself is compared with the baseline and the LoRAs of its match group; a LoRA with the baseline alone, as
    the others are compared with it. Pairs that ``questions.gain`` names come last.
    """
    methods, controls, gain = recipe.methods, controls_of(recipe.methods), recipe.questions.gain
    anchors, compared = _anchors(methods), {}
    asked = [pair for named in (gain.pairs if gain is not None else None) or () for pair in at_budgets(named, methods)]
    for name, parts in methods.items():
        others = loras_of(methods, name)
        if not is_lora(parts) and kind_of(parts) not in CONTROLS:
            others = [*(other for other in methods if name in anchors[other]), *others]
            if kind_of(parts) == "nonlinear_query":
                linear = [other for other, theirs in methods.items() if kind_of(theirs) == LINEAR_QUERY]
                alike = [other for other in linear if targets_of(methods[other]) == targets_of(parts)]
                others += [other for other in alike if budget_of(methods[other]) in (None, budget_of(parts))]
            if not others and "lora" in methods and not all("match" in part for part in parts):
                others = ["lora"]
            others += controls.get(name, {})
        others += [other for method, other in asked if method == name]
        if name != recipe.baseline:
            compared[name] = list(dict.fromkeys([recipe.baseline, *others]))
    return compared


def loras_of(methods: Mapping[str, Parts], method: str) -> list[str]:
    """Return the LoRAs of a method's match group, in the order of the recipe; none of a LoRA itself."""
    anchors = _anchors(methods)
    if is_lora(methods[method]):
        return []
    return [name for name, parts in methods.items() if is_lora(parts) and in_one_group(anchors, method, name)]


def _anchors(methods: Mapping[str, Parts]) -> dict[str, set[str]]:
    """Return the methods and budgets that each method is matched to."""
    return {name: {str(part["match"]) for part in parts if "match" in part} for name, parts in methods.items()}


def at_budgets(pair: tuple[str, str], methods: Mapping[str, Parts]) -> list[tuple[str, str]]:
    """Return a pair of methods at each budget: the common budgets, or all of one method where the other has none."""
    ours, theirs = ({budget_in(point): point for point in points_of(name, methods) or [name]} for name in pair)
    if "" in theirs or "" in ours:
        made = [(one, other) for one in ours.values() for other in theirs.values()]
    else:
        made = [(point, theirs[budget]) for budget, point in ours.items() if budget in theirs]
    return [pair for pair in made if set(pair) <= methods.keys()]


def left_out_of_pairs(whole: Compared, some: Compared) -> list[str]:
    """Return a sentence for each method of ``some`` whose comparisons with others of ``whole`` cannot be made."""
    wanted, made = references(whole), references(some)
    absent = {name: [other for other in wanted[name] if other not in some.methods] for name in made}
    return [
        f"{name} is not compared with {', '.join(others)}, which --methods leaves out"
        for name, others in absent.items()
        if others
    ]


def question_of(pair: tuple[str, str], baseline: str | None, loras: Collection[str]) -> Question:
    """Return the question that a pair of methods answers: with the baseline, with one of ``loras``, or with another."""
    return "base" if pair[1] == baseline else "lora" if pair[1] in loras else "parts"


def in_one_group(anchors: Mapping[str, Collection[str]], one: str, other: str) -> bool:
    """Return whether one method is matched to the other, or both to a third or to one budget.

    ``anchors`` are the methods and budgets that each method is matched to.
    """
    return not {one, *anchors[one]}.isdisjoint({other, *anchors[other]})


def is_lora(parts: Parts) -> bool:
    """Return whether all parts of a method are LoRA, of any variant."""
    return bool(parts) and all(part.get("type") == "lora" for part in parts)
