from hypothesis import given
from hypothesis import strategies as st

from hfpatch.evaluation.scorer import TokenRequest
from hfpatch.evaluation.scorer.batching import BatchLimits, batches, visible
from hfpatch.evaluation.scorer.trees import Tree, group, pack

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6)
PAIRS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12)


def cut(pairs, max_length=8):
    return [TokenRequest.cut(context, ending, max_length) for context, ending in pairs]


def path(tree, node):
    """The tokens from the first one to a node, by following parents."""
    tokens = []
    while node >= 0:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tokens[::-1]


def test_requests_are_cut_from_the_left_and_share_what_they_begin_with():
    request = TokenRequest.cut([1, 2, 3, 4], [5, 6], max_length=3)
    assert request == TokenRequest((3, 4, 5), (5, 6))
    assert request.context == (3, 4)
    assert TokenRequest.cut([1], [2], max_length=3) == TokenRequest((1,), (2,))
    (tree,) = group(cut([([1, 2], [3, 4, 5]), ([1, 2], [3, 6, 5]), ([1, 2], [7]), ([1, 2], [3, 4])]), longest=8)
    assert sorted(tree.tokens) == [1, 2, 3, 4, 6]
    assert [index for index, _ in sorted(tree.scored)] == [0, 1, 2, 3]
    assert not tree.is_chain
    trees = group(cut([([1, 2, 3], [4]), ([1, 2, 3], [4, 5, 6])], max_length=4), longest=8)
    assert sorted(tree.tokens for tree in trees) == [[1, 2, 3], [2, 3, 4, 5]]


@given(PAIRS, st.sampled_from([0, 4, 9, 100]), st.sampled_from([1, 3, 100]))
def test_every_request_stands_in_one_row_with_its_own_tokens_before_it(pairs, longest, endings):
    requests = cut(pairs)
    trees = group(requests, longest=longest, endings=endings)
    paths = {}
    for tree in trees:
        assert tree.depths == [len(path(tree, node)) - 1 for node in range(len(tree))]
        for index, nodes in tree.scored:
            assert index not in paths
            paths[index] = [path(tree, node) for node in nodes]
    for index, request in enumerate(requests):
        first = len(request.tokens) - len(request.targets) + 1
        assert paths[index] == [list(request.tokens[:end]) for end in range(first, len(request.tokens) + 1)]


@given(PAIRS, st.sampled_from([0, 4, 9]))
def test_rows_are_plain_or_short_enough_and_never_more_than_the_requests_need(pairs, longest):
    requests = cut(pairs)
    trees = group(requests, longest=longest)
    assert all(tree.is_chain or len(tree) <= longest for tree in trees)
    assert sum(len(tree) for tree in trees) <= sum(len(request.tokens) for request in requests)


@given(PAIRS)
def test_a_whole_tree_has_each_distinct_beginning_once(pairs):
    requests = cut(pairs)
    trees = group(requests, longest=100)
    needed = {(request.context, request.targets[:end]) for request in requests for end in range(len(request.targets))}
    contexts = {request.context for request in requests}
    assert sum(len(tree) for tree in trees) == sum(map(len, contexts)) + sum(1 for _, ending in needed if ending)


@given(PAIRS, st.integers(1, 40), st.integers(0, 40), st.randoms(use_true_random=False))
def test_batches_hold_every_row_within_the_budget_whatever_the_order(pairs, tokens, overhead, random):
    limits = BatchLimits(tokens, 1, overhead)
    trees = group(cut(pairs), longest=9)
    made = batches(trees, limits)
    assert sorted(map(id, (tree for batch in made for tree in batch))) == sorted(map(id, trees))
    assert all(len(batch) == 1 or len(batch) * max(map(len, batch)) <= tokens for batch in made)
    assert all(len({tree.is_chain for tree in batch}) == 1 for batch in made)
    shuffled = random.sample(pairs, len(pairs))
    again = batches(group(cut(shuffled), longest=9), limits)
    assert [[tree.tokens for tree in batch] for batch in again] == [[tree.tokens for tree in batch] for batch in made]


def cheapest(lengths, tokens, overhead):
    """The least cost of all ways to cut falling lengths into batches."""
    if not lengths:
        return 0
    fitting = [n for n in range(1, len(lengths) + 1) if n == 1 or n * lengths[0] <= tokens]
    return min(n * lengths[0] + overhead + cheapest(lengths[n:], tokens, overhead) for n in fitting)


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 40), st.integers(0, 20))
def test_no_other_batches_of_rows_in_falling_order_cost_less(lengths, tokens, overhead):
    made = batches([Tree.of([0] * length) for length in lengths], BatchLimits(tokens, 1, overhead))
    cost = sum(len(batch) * max(map(len, batch)) + overhead for batch in made)
    assert cost == cheapest(sorted(lengths, reverse=True), tokens, overhead)


@given(PAIRS, st.sampled_from([0, 5, 9, 30]))
def test_packed_rows_hold_every_tree_as_it_was(pairs, longest):
    requests = cut(pairs)
    trees = group(requests, longest=9)
    rows = pack(trees, longest)
    assert sum(map(len, rows)) == sum(map(len, trees))
    assert all(len(row) <= longest for row in rows if row.parents.count(-1) > 1)
    paths = {index: [path(row, node) for node in nodes] for row in rows for index, nodes in row.scored}
    assert paths == {index: [path(tree, node) for node in nodes] for tree in trees for index, nodes in tree.scored}
    for row in rows:
        assert row.depths == [len(path(row, node)) - 1 for node in range(len(row))]
        roots = [node - depth for node, depth in enumerate(row.depths) if row.parents[node] < 0]
        mask = visible(row, len(row) + 2)
        for node in range(len(row)):
            ancestors = {node}
            while row.parents[min(ancestors)] >= 0:
                ancestors.add(row.parents[min(ancestors)])
            assert set(mask[node].nonzero()[0]) == ancestors
            assert max(root for root in roots if root <= node) == min(ancestors)
        assert mask[len(row) :].nonzero()[1].tolist() == [len(row), len(row) + 1]  # padding sees itself


def test_short_trees_share_rows_and_plain_rows_stay_plain_among_their_like():
    branching = [([1, 2], [3, 3]), ([1, 2], [4, 5]), ([1, 3], [4, 4]), ([1, 3], [5, 5])]
    trees = group(cut([*branching, ([2], [3])]), longest=9)
    (row,) = pack(trees, 30)
    assert sorted(row.tokens) == sorted(token for tree in trees for token in tree.tokens)
    assert len(pack(trees, 5)) == 2
    many = group(cut([*branching[:2], *(([1, 2, 3, number], [3]) for number in range(9))]), longest=9)
    assert sorted(row.is_chain for row in pack(many, 30)) == [False] + [True] * 9
