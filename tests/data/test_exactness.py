import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfpatch.data.packing import packing_is_exact

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
def test_which_models_keep_packed_documents_apart(model_type, values, exact, dtype):
    model = build(model_type, **values).to(dtype).train()
    assert packing_is_exact(model, 40) is exact
    assert model.training


@pytest.mark.parametrize("block_size", [16, 40])
def test_frequencies_of_the_longest_document_reach_the_others_beyond_the_original_context(block_size):
    switching = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 20}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limits = {"max_position_embeddings": 64, "original_max_position_embeddings": 20, "pad_token_id": 0}
    model = build("phi3", intermediate_size=64, rope_parameters={**switching, **factors}, **limits)
    assert packing_is_exact(model, block_size) is (block_size <= 20)
