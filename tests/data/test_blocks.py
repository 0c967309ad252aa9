import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.data.blocks import IGNORE, blocks_from_stream, collate
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
    assert (blocks.documents, blocks.tokens, blocks.count_tokens([1, 1])) == (3, 13, 10)


def test_padded_row_written_out():
    made = stream([11, 12, 13], [21, 22, 23, 24, 25])
    blocks = blocks_from_stream(made, settings(block_size=4, layout="padded"), pad_token_id=1)
    assert blocks[0]["input_ids"].tolist() == [11, 12, 13, 1]
    assert blocks[0]["labels"].tolist() == [IGNORE, 12, 13, IGNORE]
    assert blocks[0]["attention_mask"].tolist() == [1, 1, 1, 0]
    assert blocks[1]["input_ids"].tolist() == [21, 22, 23, 24]
    assert "position_ids" not in blocks[0]


@given(st.lists(st.integers(2, 30), min_size=1, max_size=40), st.integers(2, 16))
def test_packing_predicts_each_pair_inside_a_piece_once(lengths, block_size):
    documents = [[1000 * index + place for place in range(length)] for index, length in enumerate(lengths)]
    blocks = blocks_from_stream(stream(*documents), settings(block_size=block_size), pad_token_id=0)
    pairs = []
    for row in (blocks[index] for index in range(len(blocks))):
        for place in range(1, block_size):
            if row["labels"][place] != IGNORE:
                assert row["position_ids"][place] == row["position_ids"][place - 1] + 1
                pairs.append((int(row["input_ids"][place - 1]), int(row["input_ids"][place])))
    expected = [
        (document[place - 1], document[place])
        for document in documents
        for place in range(1, len(document))
        if place % block_size
    ]
    assert sorted(pairs) == sorted(expected)


def test_head_and_hash():
    made = stream([1, 2, 3], [4, 5, 6, 7])
    blocks, again = (blocks_from_stream(made, settings(block_size=4), pad_token_id=0) for _ in range(2))
    assert len(blocks.head(1)) == 1
    assert torch.equal(blocks.head(1)[0]["input_ids"], blocks[0]["input_ids"])
    assert len({blocks.sha256, blocks.head(1).sha256}) == 2
    assert again.sha256 == blocks.sha256 == blocks.head(2).sha256


def test_tokenise_drops_lone_tokens_and_needs_an_end_of_text(tokenizer):
    (made,) = tokenize_in_parts(["the mill", "e", ""], tokenizer, append_eos=False)
    assert tokenizer.decode(made.tokens) == "the mill"
    assert len(made.lengths) == 1
    with pytest.raises(HfpatchError, match="no document has two tokens"):
        list(tokenize_in_parts(["e"], tokenizer, append_eos=False))
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
