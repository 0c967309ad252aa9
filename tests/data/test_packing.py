import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hfpatch.data.packing import pack, packing_is_exact, split_pieces


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


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(model_type, **values):
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL, **ends, **values))


@pytest.mark.parametrize(
    ("model_type", "values", "exact"),
    [
        ("gpt_neox", {"intermediate_size": 64}, True),
        ("llama", {"intermediate_size": 64, "num_key_value_heads": 2}, True),
        ("gpt2", {}, True),
        ("bloom", {}, False),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_models_keep_packed_documents_separate(model_type, values, exact, dtype):
    model = build(model_type, **values).to(dtype).train()
    model.get_output_embeddings().eval()
    before = [module.training for module in model.modules()]
    assert packing_is_exact(model, 40) is exact
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("block_size", [16, 40])
def test_frequencies_of_the_longest_document_reach_the_others_beyond_the_original_context(block_size):
    switching = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 20}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limits = {"max_position_embeddings": 64, "original_max_position_embeddings": 20, "pad_token_id": 0}
    model = build("phi3", intermediate_size=64, rope_parameters={**switching, **factors}, **limits)
    assert packing_is_exact(model, block_size) is (block_size <= 20)
