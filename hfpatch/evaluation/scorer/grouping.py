"""Requests that share a context as one row of tokens: the context once, then a tree of endings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenRequest:
    """One thing to score, as tokens.

    Attributes:
        tokens: what the model reads: context and continuation, cut from the left to the longest row, without the last
            token.
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
        """Return trees one after the other, as a row in which none follows another; one alone stays what it is."""
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
        node: int | None = root
        for done, token in enumerate(branch):
            node = self._children.get((node, token)) if node is not None else None
            if node is None:
                return len(branch) - done
        return 0

    def add(self, index: int, root: int, branch: Sequence[int]) -> None:
        """Add a request that is scored from ``root`` on, along a branch."""
        nodes = [root]
        for token in branch:
            nodes.append(self._child(nodes[-1], token))
        self.scored.append((index, nodes))

    def _child(self, node: int, token: int) -> int:
        if (node, token) not in self._children:
            self._children[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
        return self._children[node, token]


def group(requests: Sequence[TokenRequest], *, longest: int, endings: int = 512) -> list[Tree]:
    """Return rows that score all requests, those with the same (cut) context together.

    Args:
        requests: what to score.
        longest: the most tokens that a row with more than one ending may have; 0 gives plain rows only, in which a
            request shares a row with another if its tokens begin that row.
        endings: the most tokens that several endings may add to their context.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        members.setdefault(request.context, []).append(index)
    limits = {context: min(longest, len(context) + endings) for context in members}
    return [tree for context, group in members.items() for tree in _trees(requests, context, group, limits[context])]


def plain_rows(requests: Sequence[TokenRequest]) -> list[Tree]:
    """Return a row for each different row of tokens, which the requests of just these tokens share."""
    rows: dict[tuple[int, ...], Tree] = {}
    for index, request in enumerate(requests):
        row = rows.setdefault(request.tokens, Tree.of(request.tokens))
        row.scored.append((index, list(range(len(row) - len(request.targets), len(row)))))
    return list(rows.values())


def _trees(
    requests: Sequence[TokenRequest], context: tuple[int, ...], members: Iterable[int], longest: int
) -> Iterable[Tree]:
    """Yield the rows of one context.

    In falling order a branch comes right after those that begin with it, so that looking at the last row is enough.
    """
    branches = sorted(((requests[index].targets[:-1], index) for index in members), reverse=True)
    root = len(context) - 1
    tree = Tree.of(context)
    for branch, index in branches:
        extra = tree.missing(root, branch)
        if tree.scored and extra and len(tree) + extra > longest:
            yield tree
            tree = Tree.of(context)
        tree.add(index, root, branch)
    yield tree
