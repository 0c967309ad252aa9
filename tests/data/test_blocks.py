import numpy as np
import pytest
import torch
from data.conftest import pieces_of, stream_rows
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.data.blocks import IGNORE, JoinedRows, blocks_from_stream, collate, join_blocks
from hfpatch.data.tokenizer import TokenStream, tokenize_in_parts
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings


def stream(*documents):
    tokens = np.asarray([token for document in documents for token in document], dtype=np.uint16)
    return TokenStream(tokens, np.asarray([len(document) for document in documents], dtype=np.int64))


def settings(**values):
    return DataSettings(source="made-up", **values)


def test_packed_row_written_out():
    made = stream([11, 12, 13], [21, 22], [31, 32, 33, 34, 35, 36, 37, 38, 39])
    blocks = blocks_from_stream(made, settings(block_size=8), pad_token_id=1)
    assert len(blocks) == 2
    assert blocks[0]["input_ids"].tolist() == [31, 32, 33, 34, 35, 36, 37, 38]  # 39 alone predicts nothing
    assert blocks[0]["position_ids"].tolist() == list(range(8))
    assert blocks[0]["labels"].tolist() == [IGNORE, 32, 33, 34, 35, 36, 37, 38]
    assert blocks[1]["input_ids"].tolist() == [11, 12, 13, 21, 22, 1, 1, 1]
    assert blocks[1]["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert blocks[1]["labels"].tolist() == [IGNORE, 12, 13, IGNORE, 22, IGNORE, IGNORE, IGNORE]
    assert "attention_mask" not in blocks[1]
    assert blocks[-1]["labels"].tolist() == blocks[1]["labels"].tolist()
    with pytest.raises(IndexError):
        blocks[2]
    assert (blocks.documents, blocks.tokens, blocks.count_tokens([1, 1])) == (3, 13, 10)


def test_padded_row_written_out():
    made = stream([11, 12, 13], [21, 22, 23, 24, 25])
    blocks = blocks_from_stream(made, settings(block_size=4, layout="padded"), pad_token_id=1)
    assert blocks[0]["input_ids"].tolist() == [11, 12, 13, 1]
    assert blocks[0]["labels"].tolist() == [IGNORE, 12, 13, IGNORE]
    assert blocks[0]["attention_mask"].tolist() == [1, 1, 1, 0]
    assert blocks[1]["input_ids"].tolist() == [21, 22, 23, 24]
    assert "position_ids" not in blocks[0]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=40), st.integers(4, 16), st.integers(0, 2))
def test_packed_rows_hold_each_piece_once_and_predict_what_follows_its_first_token(lengths, block_size, added):
    """A last token alone is left out; pieces from inside a document begin with the start tokens."""
    start, expected = [7000, 7001][:added], []
    documents = [[100 * index + position for position in range(length)] for index, length in enumerate(lengths)]
    for document in documents:
        at = 0
        while at < len(document):
            before = start if at else []
            taken = document[at : at + block_size - len(before)]
            expected += [(before + taken, [IGNORE] * (1 + len(before)) + taken[1:])] * (len(taken) > 1)
            at += len(taken)
    blocks = blocks_from_stream(stream(*documents), settings(block_size=block_size), pad_token_id=0, start=start)
    assert sorted(pieces_of(blocks)) == sorted(expected)
    least = -(-sum(len(ids) for ids, _ in expected) // block_size)
    assert len(blocks) <= 1.5 * least + 1  # best-fit decreasing needs at most 11/9 of the optimum, plus one


def test_rows_that_begin_inside_a_document_begin_as_documents_do():
    """Neither the added token nor the one after it is predicted, as no first token of a piece is."""
    made = stream([9, 11, 12, 13, 14, 15, 16], [9, 21, 22])
    blocks = blocks_from_stream(made, settings(block_size=4), pad_token_id=1, start=[9], with_owners=True)
    assert [row.tolist() for row in blocks.rows] == [[9, 11, 12, 13], [9, 14, 15, 16], [9, 21, 22, 1]]
    assert blocks[0]["labels"].tolist() == [IGNORE, 11, 12, 13]
    assert blocks[1]["labels"].tolist() == [IGNORE, IGNORE, 15, 16]
    assert blocks.owners.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, -1]]
    assert (blocks.tokens, blocks.count_predicted(range(3)), blocks.take(np.array([1])).count_predicted([0])) == (
        11,
        7,
        2,
    )
    joined = join_blocks([blocks_from_stream(stream([1, 2]), settings(block_size=4), pad_token_id=1), blocks], [1, 1])
    assert joined[2]["labels"].tolist() == [IGNORE, IGNORE, 15, 16]
    padded = blocks_from_stream(made, settings(block_size=4, layout="padded"), pad_token_id=1, start=[9])
    assert [row.tolist() for row in padded.rows] == [[9, 11, 12, 13], [9, 21, 22, 1]]
    with pytest.raises(HfpatchError, match=r"data.block_size is 2; must be at least 3"):
        blocks_from_stream(made, settings(block_size=2), pad_token_id=1, start=[9])


@pytest.mark.parametrize("gaps", [False, True])
@given(st.lists(st.integers(1, 12), min_size=3, max_size=30), st.integers(4, 7), st.integers(0, 2), st.booleans())
def test_rows_of_a_stream_written_out(gaps, lengths, block_size, added, owned):
    """Cut from the documents as one list, after the start tokens unless a document begins there."""
    start = [7000, 7001][:added]
    documents = [[100 * index + position for position in range(length)] for index, length in enumerate(lengths)]
    kept = [number for number in range(len(documents)) if not gaps or number % 3 != 1]
    rows = stream_rows([documents[number] for number in kept], block_size, start)
    given = {"pad_token_id": 0, "start": start, "with_owners": owned}
    made = stream(*documents).take(np.array(kept))
    chosen = settings(block_size=block_size, layout="stream")
    if not rows:
        with pytest.raises(HfpatchError, match="do not fill one block"):
            blocks_from_stream(made, chosen, **given)
        return
    blocks = blocks_from_stream(made, chosen, **given)
    assert np.asarray(blocks.rows).tolist() == rows
    for index, row in enumerate(rows):
        ignored = 1 + (added if row[0] == 7000 else 0)
        assert blocks[index]["labels"].tolist() == [IGNORE] * ignored + row[ignored:]
    if owned:
        real = np.asarray(rows) < 7000
        assert (blocks.owners >= 0).all()
        owners = [[kept.index(token // 100) for token in row if token < 7000] for row in rows]
        assert [row_owners[is_real].tolist() for row_owners, is_real in zip(blocks.owners, real, strict=True)] == owners
    if not start and not owned:  # only rows that cross a gap are copies
        arrays = blocks.rows.arrays if isinstance(blocks.rows, JoinedRows) else [blocks.rows]
        assert all(np.shares_memory(array, made.tokens) or len(array) == 1 for array in arrays)


def test_head_and_hash():
    made = stream([1, 2, 3], [4, 5, 6, 7])
    blocks, again = (blocks_from_stream(made, settings(block_size=4), pad_token_id=0) for _ in range(2))
    assert len(blocks.head(1)) == 1
    assert torch.equal(blocks.head(1)[0]["input_ids"], blocks[0]["input_ids"])
    assert len({blocks.sha256, blocks.head(1).sha256}) == 2
    assert again.sha256 == blocks.sha256 == blocks.head(2).sha256


def test_tokenise_drops_lone_tokens_and_needs_an_end_of_text(tokenizer):
    ((made, *_),) = tokenize_in_parts(["the mill", "e", ""], tokenizer, append_eos=False)
    assert tokenizer.decode(made.tokens) == "the mill"
    assert len(made.lengths) == 1
    bare = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(HfpatchError, match="no end-of-text token"):
        list(tokenize_in_parts(["the mill"], bare, append_eos=True))


def test_rows_are_stacked_without_what_a_model_assumes_by_itself():
    def stacked(*rows):
        return collate([{name: torch.tensor(value) for name, value in row.items()} for row in rows])

    batch = stacked({"input_ids": [1, 2], "position_ids": [0, 0]}, {"input_ids": [3, 4], "position_ids": [0, 1]})
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert batch["position_ids"].tolist() == [[0, 0], [0, 1]]
    assert set(stacked({"input_ids": [1, 2], "position_ids": [0, 1]})) == {"input_ids"}
    assert set(stacked({"input_ids": [1, 2], "attention_mask": [1, 1]})) == {"input_ids"}
    assert "attention_mask" in stacked({"input_ids": [1, 2], "attention_mask": [1, 0]})
