import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from hfpatch.data.packing import pack, packing_obstacle


def test_best_fit_takes_the_tightest_row():
    order, offsets = pack(np.array([9, 7, 6, 3, 1]), 10)
    assert [part.tolist() for part in np.split(order, offsets[1:-1])] == [[0, 4], [1, 3], [2]]  # [9, 1], [7, 3], [6]


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
    assert (packing_obstacle(model, 40) is None) is exact
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(("block_size", "original"), [(16, 20), (40, 20), (160, 100)])
def test_frequencies_of_the_longest_document_reach_the_others_beyond_the_original_context(block_size, original):
    switching = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": original}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limits = {"max_position_embeddings": 256, "original_max_position_embeddings": original, "pad_token_id": 0}
    model = build("phi3", intermediate_size=64, rope_parameters={**switching, **factors}, **limits)
    assert (packing_obstacle(model, block_size) is None) is (block_size <= original)


@pytest.mark.parametrize(("model_type", "values"), [("llama", {}), ("gpt2", {"n_positions": 256})])
def test_short_rows_are_tried_where_they_tell_as_much(model_type, values):
    model, lengths = build(model_type, **values), []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert packing_obstacle(model, 256) is None
    assert max(lengths) == 64


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(
    ("model_type", "values", "why"),
    [
        ("llama", {"intermediate_size": 64, "num_key_value_heads": 2}, None),
        ("gpt_neox", {"intermediate_size": 64}, None),
        ("bloom", {}, "attention crosses"),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, "attention crosses"),
    ],
)
def test_rounding_to_8_bits_is_not_taken_for_attention(model_type, values, why, tmp_path):
    plain, settings = build(model_type, **values), BitsAndBytesConfig(load_in_8bit=True)
    for name, parameter in plain.named_parameters():  # inputs beyond LLM.int8's threshold of 6 for some tokens
        if "norm" in name and name.endswith("weight"):
            parameter.data[::4] *= 2.5
    plain.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, device_map="cpu").eval()
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        alone, before = model(tokens[:1]).logits, model(tokens).logits
    if why is None:  # a text's batch changes it
        assert (alone - before[:1]).abs().max() > 1e-3 * alone.abs().max()
    obstacle = packing_obstacle(model, 40)
    assert obstacle is None if why is None else why in obstacle
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize(
    ("model_type", "why"), [("llama", "quantised"), ("gpt_neox", "quantised"), ("bloom", "attention crosses")]
)
def test_what_rounding_by_batch_hides_is_named(model_type, why):
    model = build(model_type, **({} if model_type == "bloom" else {"intermediate_size": 64}))

    def rounded(_module, arguments):
        step = arguments[0].abs().amax() / 7
        return ((arguments[0] / step).round() * step,)

    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    assert why in packing_obstacle(model, 40)
