"""What trials have found about a model, so that none is made twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hfpatch.sites.lm_head import PLAIN, Tail


class Padding(NamedTuple):
    """Whether rows may be padded.

    Attributes:
        shortest: tokens of the shortest row.
        longest: tokens of the longest row.
        obstacle: why they may not; None if they may.
        trims: whether the last block may leave out positions that are not scored.
    """

    shortest: int
    longest: int
    obstacle: str | None
    trims: bool


class TreeTrial(NamedTuple):
    """Whether a row with several endings gives the features of plain rows.

    Attributes:
        row: its tokens.
        path: tokens of its longest text.
        exact: whether it does.
    """

    row: int
    path: int
    exact: bool


@dataclass
class Findings:
    """The results of trials.

    Attributes:
        split: whether body and head give the model's logits; None if that was not tried.
        tail: what the model does with its head's output, where they do.
        padding: of rows of these lengths.
        trees: of rows of these sizes.
    """

    split: bool | None = None
    tail: Tail = PLAIN
    padding: list[Padding] = field(default_factory=list)
    trees: list[TreeTrial] = field(default_factory=list)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Findings:
        """Return findings from what `to_json` gave."""
        padding = [Padding(*each) for each in values["padding"]]
        trees = [TreeTrial(*each) for each in values["trees"]]
        return cls(values["split"], Tail(*values["tail"]), padding, trees)

    def to_json(self) -> dict[str, Any]:
        """Return what was found exact. What failed may have lacked memory: it is tried again."""
        padding = [each for each in self.padding if each.obstacle is None]
        trees = [each for each in self.trees if each.exact]
        return {"split": self.split or None, "tail": [*self.tail], "padding": padding, "trees": trees}

    def padding_of(self, shortest: int, longest: int) -> Padding | None:
        """Return what is known of padding rows of these lengths; what holds for a range holds within it."""
        for each in self.padding:
            exact = each.obstacle is None and each.shortest <= shortest and longest <= each.longest
            if exact or (each.shortest, each.longest) == (shortest, longest):
                return each
        return None

    def tree_is_exact(self, row: int, path: int) -> bool | None:
        """Return what is known of trees of these sizes; what holds for some holds for smaller ones."""
        if any(each.exact and row <= each.row and path <= each.path for each in self.trees):
            return True
        if any(not each.exact and each.row <= row and each.path <= path for each in self.trees):
            return False
        return None
