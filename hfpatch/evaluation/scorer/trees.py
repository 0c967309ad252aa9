"""Rows of tokens to score: requests with one context become a tree of endings, and short trees share a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

_MOST_ADDED = 16  # times the tokens shared with a tree; beyond that, attention to masked tokens costs as much
ROW = 128  # tokens; in longer rows attention to masked tokens costs more than padding does


@dataclass(frozen=True)
class TokenRequest:
    """A context and a continuation as tokens.

    Attributes:
        tokens: the model's input: context and continuation without the last token, truncated from the left to the
            longest row.
        targets: the continuation; the last ``len(targets)`` positions of ``tokens`` predict it.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def cut(cls, context: Sequence[int], continuation: Sequence[int], max_length: int) -> TokenRequest:
        """Return the request that lm-eval's Hugging Face model makes of a context and a continuation."""
        return cls(tuple([*context, *continuation][-(max_length + 1) :][:-1]), tuple(continuation))

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens up to the one that predicts the first target."""
        return self.tokens[: len(self.tokens) - len(self.targets) + 1]


@dataclass
class Tree:
    """A row of tokens in which each one follows its parent, which need not be the one before it.

    Attributes:
        tokens: the tokens, parents before children.
        parents: the index of each token's parent; -1 for the first of a text.
        depths: the number of tokens before each one on its path, which is its position.
        scored: for each request its index and the nodes that predict its targets.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scored: list[tuple[int, list[int]]] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, context: Sequence[int]) -> Tree:
        """Return the tree that is a context alone."""
        size = len(context)
        return cls(list(context), list(range(-1, size - 1)), list(range(size)))

    @classmethod
    def joined(cls, trees: Sequence[Tree]) -> Tree:
        """Return trees one after the other in one row; a single tree is returned as it is."""
        if len(trees) == 1:
            return trees[0]
        row = cls([], [], [])
        for tree in trees:
            start = len(row)
            row.tokens += tree.tokens
            row.parents += [parent + start if parent >= 0 else parent for parent in tree.parents]
            row.depths += tree.depths
            row.scored += [(index, [node + start for node in nodes]) for index, nodes in tree.scored]
        return row

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before it, as in a plain row."""
        return self.depths[-1] == len(self) - 1

    def missing(self, root: int, branch: Sequence[int]) -> int:
        """Return how many tokens of a branch below ``root`` the tree does not have yet."""
        node = root
        for done, token in enumerate(branch):
            if (node, token) not in self._children:
                return len(branch) - done
            node = self._children[node, token]
        return 0

    def add(self, index: int, root: int, branch: Sequence[int]) -> None:
        """Add a request that is scored from ``root`` on, along a branch."""
        nodes = [root]
        for token in branch:
            edge = (nodes[-1], token)
            if edge not in self._children:
                self._children[edge] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(nodes[-1])
                self.depths.append(self.depths[nodes[-1]] + 1)
            nodes.append(self._children[edge])
        self.scored.append((index, nodes))


def group(requests: Sequence[TokenRequest], *, longest: int, endings: int = 512) -> list[Tree]:
    """Return rows that score all requests, those with the same (truncated) context together.

    Args:
        requests: the requests.
        longest: the most tokens that a row with more than one ending may have; 0 gives plain rows only, in which a
            request shares a row with another if its tokens begin that row.
        endings: the most tokens that several endings may add to their context.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        members.setdefault(request.context, []).append(index)
    trees = []
    for context, indices in members.items():
        limit, root, tree = min(longest, len(context) + endings), len(context) - 1, Tree.of(context)
        # In descending order a branch comes right after its own extensions: only the last tree can contain it.
        for branch, index in sorted(((requests[index].targets[:-1], index) for index in indices), reverse=True):
            extra = tree.missing(root, branch)
            shared = len(context) + len(branch) - extra
            if tree.scored and extra and (len(tree) + extra > limit or extra > _MOST_ADDED * shared):
                trees.append(tree)
                tree = Tree.of(context)
            tree.add(index, root, branch)
        trees.append(tree)
    return trees


def pack(trees: Sequence[Tree], longest: int) -> list[Tree]:
    """Return rows that contain all trees, several short ones in a row; no tree attends to another.

    Each row takes the largest tree that still fits, again and again, up to ``longest`` tokens. If most tokens are in
    plain rows, plain rows stay as they are: they need no mask.
    """
    longest = min(longest, ROW)
    plain = sum(len(tree) for tree in trees if tree.is_chain)
    together = 2 * plain < sum(map(len, trees))
    short = [tree for tree in trees if len(tree) <= longest and (together or not tree.is_chain)]
    alone = set(map(id, trees)) - set(map(id, short))
    waiting = sorted(short, key=lambda tree: (len(tree), tree.tokens))
    sizes = [len(tree) for tree in waiting]
    rows = []
    while waiting:
        row: list[Tree] = []
        space = longest
        while at := bisect_right(sizes, space):
            row.append(waiting.pop(at - 1))
            space -= sizes.pop(at - 1)
        rows.append(Tree.joined(row))
    return [*rows, *(tree for tree in trees if id(tree) in alone)]
