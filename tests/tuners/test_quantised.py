"""4-bit bases of bitsandbytes: gradients beside evaluations, against those through the dequantised weights."""

import copy

import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu, dequantize_4bit
from bitsandbytes.nn import Linear4bit
from families import gradients, logits_of, make_config, make_model, make_tokens, perturb
from peft import LoraConfig, PeftModel, get_peft_model
from torch.ao.quantization import quantize_dynamic
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import hfpatch

METHODS = {
    "methods": [hfpatch.PreProjectionConfig(content_skip=True), hfpatch.NonlinearQueryConfig()],
    "lora": LoraConfig(r=2, init_lora_weights=True, target_modules=["q_proj", "v_proj"]),
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = make_config("llama", hidden_size=64, intermediate_size=64)  # blocks of 64 share a scale
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return lambda: AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=options, device_map="cpu", dtype=torch.float32
    ).eval()


def packed(model):
    """The model after a forward pass on a CPU with avx512_bf16."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            state = module.weight.quant_state
            module.weight.data, module.weight.quant_state = _convert_weight_packed_for_cpu(module.weight.data, state)
    return model


def plain(model):
    """A copy of a quantised model with linear layers of the dequantised weights."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight.data = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("name", METHODS)
def test_an_evaluation_before_a_step_leaves_its_gradients(name, quantised):
    base = quantised()
    expected = hfpatch.patch(plain(base), METHODS[name])
    model = hfpatch.patch(base, METHODS[name])
    for patched in (expected, model):
        perturb(patched, std=0.1)
    with torch.no_grad():
        model.eval()(make_tokens())
    grads = gradients(model.train(), make_tokens())
    assert grads
    torch.testing.assert_close(grads, gradients(expected.train(), make_tokens()), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["PreProjectionConfig", "NonlinearQueryConfig", "OutputGateConfig", "LoReFTConfig"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao.quantization moves to torchao
def test_layers_that_torch_quantises_are_patched_and_patched_ones_are_not_quantised(name):
    """The base's quantised layers have no parameters, and torch loses hooks as it replaces layers."""
    base = quantize_dynamic(make_model("llama").eval(), {torch.nn.Linear}, dtype=torch.qint8)
    expected, config = logits_of(base, make_tokens()), getattr(hfpatch, name)()
    hfpatch.patch(base, config)
    assert torch.equal(logits_of(base, make_tokens()), expected)
    perturb(base)
    assert not torch.allclose(logits_of(base, make_tokens()), expected, rtol=1e-3)
    later = quantize_dynamic(hfpatch.patch(make_model("llama"), config).eval(), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(hfpatch.HfpatchError, match="quantise the base first and patch it then"):
        later(make_tokens())


@pytest.mark.parametrize("name", METHODS)
def test_packed_weights_are_not_trained_through(name, quantised, tmp_path):
    why = r"q_proj: bitsandbytes has packed the 4-bit weights for inference, .*; load the model again"
    model = packed(quantised())
    with pytest.raises(hfpatch.HfpatchError, match=why):
        hfpatch.patch(model, METHODS[name])
    assert not any("lora" in name or "hfpatch" in name for name, _ in model.named_modules())
    hfpatch.save_patch(hfpatch.patch(quantised(), METHODS[name]), tmp_path / "patch")
    with pytest.raises(hfpatch.HfpatchError, match=why):
        hfpatch.load_patch(model, tmp_path / "patch", trainable=True, allow_other_base=True)


def test_packed_weights_serve_a_loaded_patch_until_it_is_trained(quantised, tmp_path):
    config = hfpatch.PreProjectionConfig()
    with pytest.raises(hfpatch.HfpatchError, match="has packed the 4-bit weights"):
        get_peft_model(packed(quantised()), config)
    trained = get_peft_model(quantised(), config)
    trained.save_pretrained(tmp_path / "peft")
    hfpatch.save_patch(trained, tmp_path / "patch")
    tokens = make_tokens()
    for model in (
        PeftModel.from_pretrained(packed(quantised()), tmp_path / "peft"),
        hfpatch.load_patch(packed(quantised()), tmp_path / "patch", allow_other_base=True),
    ):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("hfpatch_" in name)
        with pytest.raises(hfpatch.HfpatchError, match=r"layer \d: bitsandbytes has packed"):
            model(tokens)
    stock = hfpatch.unpatch(model)
    assert not any(module._forward_pre_hooks for module in stock.modules() if isinstance(module, Linear4bit))
