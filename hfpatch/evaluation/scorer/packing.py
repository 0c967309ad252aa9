"""Several trees in one row, where short ones would leave much of a batch to padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from hfpatch.evaluation.scorer.grouping import Tree

ROW = 128  # tokens: beyond, attention to what is not seen anyway costs more than padding


def packed(trees: Sequence[Tree], longest: int) -> list[Tree]:
    """Return rows that hold all trees, short ones side by side; none sees another.

    Where most tokens stand in plain rows, these stay what they are: they need no mask.

    Args:
        trees: one for each context.
        longest: the most tokens of a row with more than one tree.
    """
    longest = min(longest, ROW)
    plain = sum(len(tree) for tree in trees if tree.is_chain)
    together = 2 * plain < sum(map(len, trees))
    short = [tree for tree in trees if len(tree) <= longest and (together or not tree.is_chain)]
    chosen = set(map(id, short))
    return [*_rows(short, longest), *(tree for tree in trees if id(tree) not in chosen)]


def _rows(trees: Sequence[Tree], longest: int) -> list[Tree]:
    """Fill one row after another, each time with the largest tree that still goes in."""
    waiting = sorted(trees, key=lambda tree: (len(tree), tree.tokens))
    sizes = [len(tree) for tree in waiting]
    rows = []
    while waiting:
        row: list[Tree] = []
        room = longest
        while at := bisect_right(sizes, room):
            row.append(waiting.pop(at - 1))
            room -= sizes.pop(at - 1)
        rows.append(Tree.joined(row))
    return rows
