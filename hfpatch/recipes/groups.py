"""Groups of trained tensors, by what they do: a recipe gives each its own learning rate or dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

Group = Literal["pre_projection", "skip", "query", "lora", "other"]
GROUPS: tuple[Group, ...] = get_args(Group)

_MARKS: tuple[tuple[str, Group], ...] = (
    ("preproj_skip", "skip"),
    ("preproj_", "pre_projection"),
    ("nonlinear_", "query"),
    ("lora_", "lora"),
)


def group_of(name: str) -> Group:
    """Return the group of a parameter by its name in the model.

    ``skip`` is W_skip, ``pre_projection`` the pre-projection's other matrices, ``query`` everything of a nonlinear
    query (also where its targets are keys or values), ``lora`` LoRA's matrices, ``other`` the rest.
    """
    parts = name.split(".")
    return next((group for mark, group in _MARKS if any(part.startswith(mark) for part in parts)), "other")


def by_group(names: Iterable[str]) -> dict[Group, list[str]]:
    """Return the names of each group that is there."""
    found: dict[Group, list[str]] = {}
    for name in names:
        found.setdefault(group_of(name), []).append(name)
    return found
