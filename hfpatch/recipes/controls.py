"""Which methods of a comparison keep one part of another method alone, and so say where its effect comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfpatch.recipes.budgets import budget_of

Parts = Sequence[Mapping[str, Any]]

SKIP_ALONE = "the skip alone"
LINEAR_PRE_PROJECTION = "the linear pre-projection"
LINEAR_QUERY = "the linear query"
QUERY_TEMPERATURE = "the query temperature"
NO_SKIP = "the pre-projection without the skip"
LINEAR_NO_SKIP = "the linear pre-projection without the skip"


@dataclass(frozen=True)
class Control:
    """A method beside another one.

    Attributes:
        name: its name in the recipe.
        keeps: what it keeps of the other method, in words.
    """

    name: str
    keeps: str

    @property
    def has_its_size(self) -> bool:
        """Whether it is meant to have as many parameters as the method that it belongs to."""
        return self.keeps in (LINEAR_PRE_PROJECTION, LINEAR_QUERY)


def is_control(parts: Parts) -> bool:
    """Return whether a method is a control by its form: the skip alone, what has no nonlinearity, a temperature."""
    return kind_of(parts) in (SKIP_ALONE, LINEAR_PRE_PROJECTION, LINEAR_QUERY, QUERY_TEMPERATURE)


def controls_of(methods: Mapping[str, Parts]) -> dict[str, list[Control]]:
    """Return the controls of every method that has some, in the order of the methods.

    ====================================  ==========================================================================
    a method that is one                  its controls
    ====================================  ==========================================================================
    nonlinear pre-projection              a linear one (``activation: identity``) without a skip
    the same with a content skip          linear ones, the skip alone (``expansion: 0``), the one without the skip
    nonlinear query, key or value         a linear one (``activation: identity``) of its form and targets
    nonlinear query or key                the query temperature
    ====================================  ==========================================================================

    One budget of a method has those of its own budget, and those without a budget.

    Args:
        methods: the parts of each method, by its name.
    """
    found = {name: [*_controls(parts, methods)] for name, parts in methods.items() if not is_control(parts)}
    return {name: controls for name, controls in found.items() if controls}


def _controls(parts: Parts, methods: Mapping[str, Parts]) -> Iterator[Control]:
    own = kind_of(parts)
    with_skip = own == "pre_projection" and bool(parts[0].get("content_skip"))
    for name, other in methods.items():
        kind = kind_of(other)
        if not has_its_budget(other, parts):
            continue
        if own == "nonlinear_query" and kind == QUERY_TEMPERATURE and targets_of(parts) != {"value"}:
            yield Control(name, kind)
        elif own == "nonlinear_query" and kind == LINEAR_QUERY:
            forms = [each[0].get("form", "preserving") for each in (other, parts)]
            if forms[0] == forms[1] and targets_of(other) == targets_of(parts):
                yield Control(name, kind)
        elif own == "pre_projection" and kind == LINEAR_PRE_PROJECTION and not other[0].get("content_skip"):
            yield Control(name, LINEAR_NO_SKIP if with_skip else kind)
        elif with_skip and kind in (SKIP_ALONE, LINEAR_PRE_PROJECTION):
            yield Control(name, kind)
        elif with_skip and kind == own and other[0] == {k: v for k, v in parts[0].items() if k != "content_skip"}:
            yield Control(name, NO_SKIP)


def has_its_budget(control: Parts, parts: Parts) -> bool:
    """Return whether a control has the budget of a method, or none."""
    return budget_of(control) in (None, budget_of(parts))


def targets_of(parts: Parts) -> set[str]:
    """Return which of query, key and value a nonlinear query of one part changes."""
    targets = parts[0].get("targets", "query")
    return {targets} if isinstance(targets, str) else set(targets)


def kind_of(parts: Parts) -> str | None:
    """Return what a method of one part is: its type, or what it keeps where it is a control; None for a stack."""
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
