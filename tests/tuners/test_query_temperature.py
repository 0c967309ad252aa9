"""The query temperature in PEFT's and transformers' calls, and beside other methods on the same query."""

import copy

import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb
from peft import HRAConfig, LoraConfig, PeftModel, get_peft_model

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, QueryTemperatureConfig

MANY = ["gpt_neox", "gpt2", "phi3", "qwen3", "falcon_new_decoder"]  # per head; Conv1D; concatenated; normed; grouped
HEADS = 4


def temperatures(model):
    return [p for name, p in model.named_parameters() if "temperature_query" in name]


def trained(case, **options):
    model = get_peft_model(make_model(case), QueryTemperatureConfig(**options)).eval()
    perturb(model, std=0.5)
    return model


@pytest.mark.parametrize("case", MANY)
def test_it_is_saved_and_merged_where_no_norm_follows_the_projection(case, tmp_path):
    model, tokens = trained(case), make_tokens()
    model.save_pretrained(tmp_path)
    expected = logits_of(model, tokens)
    assert torch.equal(logits_of(PeftModel.from_pretrained(make_model(case), tmp_path), tokens), expected)
    assert (expected - logits_of(make_model(case), tokens)).abs().max() > 1e-3
    if hfpatch.find_sites(model)[0].heads.norm is None:
        merged = logits_of(copy.deepcopy(model).merge_and_unload(), tokens)
        torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(ValueError, match=r"temperature cannot be merged .*: it acts behind"):
            model.merge_and_unload()
    assert torch.equal(logits_of(model.unload(), tokens), logits_of(make_model(case), tokens))


def test_one_number_a_head_in_fp32_and_chosen_layers_alone():
    model = hfpatch.patch(make_model("gemma2", torch.bfloat16), QueryTemperatureConfig(layers_to_transform=[1]))
    (tau,) = temperatures(model)
    assert (tau.dtype, tau.shape) == (torch.float32, (HEADS,))
    assert hfpatch.patch_summary(model).per_layer == {1: HEADS}


@pytest.mark.parametrize("case", MANY)
def test_adapters_multiply(case):
    tokens, values = make_tokens(), torch.tensor([0.5, -0.5, 1.0, 0.0])
    once, twice = (hfpatch.patch(make_model(case), [QueryTemperatureConfig()] * n) for n in (1, 2))
    for tau in temperatures(once):
        tau.data.copy_((1 + values) * (1 + values.flip(0)) - 1)
    for place, tau in enumerate(temperatures(twice)):
        tau.data.copy_(values.flip(0) if place % 2 else values)
    torch.testing.assert_close(logits_of(twice, tokens), logits_of(once, tokens), rtol=1e-4, atol=1e-4)


def test_minus_one_half_is_the_literal_form_without_f():
    tokens, query = make_tokens(), NonlinearQueryConfig(form="literal", output_norm="none")
    halved, literal = hfpatch.patch(make_model("llama"), QueryTemperatureConfig()), make_model("llama")
    for tau in temperatures(halved):
        tau.data.fill_(-0.5)
    hfpatch.patch(literal, query)
    for name, parameter in literal.named_parameters():
        if "nonlinear_query_down" in name:
            parameter.data.zero_()
    torch.testing.assert_close(logits_of(halved, tokens), logits_of(literal, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [1, -1])
@torch.no_grad()
def test_lora_is_added_to_the_scaled_query_in_either_order(order):
    configs = [QueryTemperatureConfig(), LoraConfig(r=2, target_modules=["q_proj"])]
    model = hfpatch.patch(make_model("llama"), configs[::order], names=["a", "b"][::order])
    perturb(model, std=0.3)
    query, tau = model.model.layers[0].self_attn.q_proj, temperatures(model)[0]
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    scaled = (x @ query.get_base_layer().weight.T).reshape(2, 3, HEADS, -1) * (1 + tau)[:, None]
    added = x @ query.lora_A["b"].weight.T @ query.lora_B["b"].weight.T * query.scaling["b"]
    torch.testing.assert_close(query(x), scaled.flatten(2) + added, rtol=1e-5, atol=1e-5)


def test_a_method_that_bypasses_the_projection_is_refused_unless_a_norm_follows():
    bypass = HRAConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(HfpatchError, match="hra does not call the projection"):
        hfpatch.patch(make_model("llama"), [QueryTemperatureConfig(), bypass])
    assert hfpatch.patch_summary(hfpatch.patch(make_model("qwen3"), [bypass, QueryTemperatureConfig()])).added > 0


def test_a_norm_of_another_shape_is_an_error_and_no_wrong_result(monkeypatch):
    from hfpatch.sites import heads

    monkeypatch.setattr(heads, "NORMED_WITH_HEADS_FIRST", {"Qwen3Attention"})
    model = hfpatch.patch(make_model("qwen3"), QueryTemperatureConfig())
    with pytest.raises(HfpatchError, match=r"q_norm returns \(2, 9, 4, 8\), which has no 4 heads at axis 1") as error:
        logits_of(model, make_tokens())
    assert "\n" not in str(error.value)
