import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.data.packing import pack, split_pieces


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(2, 16))
def test_pieces_cover_every_document_once_but_lone_tokens(lengths, block_size):
    pieces = split_pieces(np.asarray(lengths), block_size)
    expected, start = [], 0
    for length in lengths:
        for offset in range(0, length, block_size):
            size = min(block_size, length - offset)
            expected += [[start + offset, size]] if size > 1 else []
        start += length
    assert pieces.tolist() == expected


def rows_of(sizes, block_size):
    order, offsets = pack(np.asarray(sizes), block_size)
    return [part.tolist() for part in np.split(order, offsets[1:-1])]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=200))
def test_rows_hold_every_piece_once_and_never_overflow(sizes):
    rows = rows_of(sizes, 16)
    assert sorted(piece for row in rows for piece in row) == list(range(len(sizes)))
    assert all(0 < sum(sizes[piece] for piece in row) <= 16 for row in rows)
    least = -(-sum(sizes) // 16)
    assert len(rows) <= 1.5 * least + 1  # best-fit decreasing needs at most 11/9 of the optimum, plus one


def test_best_fit_takes_the_tightest_row():
    sizes = [9, 7, 6, 3, 1]  # rows of 10: [9, 1], [7, 3], [6]
    assert rows_of(sizes, 10) == [[0, 4], [1, 3], [2]]
