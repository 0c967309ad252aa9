"""The results of trials on a model, so that none is repeated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Padding(NamedTuple):
    """Whether rows from the ``shortest`` to the ``longest``, in tokens, may be padded.

    ``obstacle`` is why they may not; ``trims`` is whether the last block may leave out positions that are not scored.
    """

    shortest: int
    longest: int
    obstacle: str | None
    trims: bool


class TreeTrial(NamedTuple):
    """Whether a ``row`` of several endings, its longest text a ``path``, is ``exact``: as its texts in plain rows."""

    row: int
    path: int
    exact: bool


@dataclass
class Findings:
    """The results of trials.

    Attributes:
        padding: of rows of these lengths.
        trees: of rows of these sizes.
    """

    padding: list[Padding] = field(default_factory=list)
    trees: list[TreeTrial] = field(default_factory=list)

    def padding_of(self, shortest: int, longest: int) -> Padding | None:
        """Return the known result for rows of these lengths; a success for a range holds within it."""
        for trial in self.padding:
            exact = trial.obstacle is None and trial.shortest <= shortest and longest <= trial.longest
            if exact or (trial.shortest, trial.longest) == (shortest, longest):
                return trial
        return None

    def tree_is_exact(self, row: int, path: int) -> bool | None:
        """Return the known result for trees of these sizes; a success holds for smaller ones, a failure for larger."""
        if any(tree.exact and row <= tree.row and path <= tree.path for tree in self.trees):
            return True
        if any(not tree.exact and tree.row <= row and tree.path <= path for tree in self.trees):
            return False
        return None
