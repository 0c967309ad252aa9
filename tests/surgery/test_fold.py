"""A folded model is the stock one with other weights, and computes what the patched one computed."""

import copy

import pytest
import torch
from families import FAMILIES, LLAMA, frozen, logits_of, make_model, make_tokens, perturb, unchanged
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import hfpatch
from hfpatch import (
    CanonConfig,
    HfpatchError,
    LoReFTConfig,
    NonlinearLoraConfig,
    NonlinearQueryConfig,
    OutputGateConfig,
    PreProjectionConfig,
    QueryTemperatureConfig,
)

LINEAR = PreProjectionConfig(activation="identity")


def patched(model, *configs, std=0.1):
    hfpatch.patch(model, list(configs) or LINEAR)
    perturb(model, std=std)
    return model


def with_biases():
    """A Llama with grouped queries and a bias in every projection; RMSNorms of transformers compute in fp32."""
    config = AutoConfig.for_model("llama", **{**LLAMA, "attention_bias": True})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


@torch.no_grad()
def attention_outputs(model, site, x):
    """What the projections of an attention return for x ``(batch, seq, hidden)``, as they stand."""
    names = ["query_key_value", "c_attn", "q_proj", "k_proj", "v_proj"]
    return [getattr(site.attention, name)(x) for name in names if hasattr(site.attention, name)]


@pytest.mark.parametrize("make", [lambda: make_model("gpt_neox"), lambda: make_model("gpt2"), with_biases])
def test_projections_compute_the_formula_to_rounding_in_double_precision(make):
    model = patched(make().double(), LINEAR, PreProjectionConfig(activation="identity", expansion=0.5)).double()
    tensors = {name: p.detach().clone() for name, p in model.named_parameters() if "preproj_" in name}
    plain, tokens = copy.deepcopy(model), make_tokens()
    expected_logits = logits_of(model, tokens)
    hfpatch.unpatch(plain)
    assert hfpatch.fold(model) is model
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for folded, site in zip(hfpatch.find_sites(model), hfpatch.find_sites(plain), strict=True):
        moved = x
        for adapter in ("pre_projection", "pre_projection_2"):
            at = f"{site.path}.hfpatch_pre_projection"
            up, down = (tensors[f"{at}.preproj_{kind}.{adapter}.weight"] for kind in ("up", "down"))
            moved = moved + (moved @ up.T) @ down.T
        assert (moved - x).abs().max() > 0.1
        expected = attention_outputs(plain, site, moved)
        assert expected
        for a, b in zip(attention_outputs(model, folded, x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits_of(model, tokens), expected_logits, rtol=1e-12, atol=1e-6)  # norms in fp32


@pytest.mark.parametrize(  # the norms of these models compute in the dtype of the model
    ("case", "config"),
    [("gpt_neox", LINEAR), ("gpt2", LINEAR), ("gpt2", LoReFTConfig(at="branch"))],  # LoReFT needs a bias
)
def test_logits_are_equal_to_1e_12(case, config):
    model, tokens = patched(make_model(case).double(), config).double(), make_tokens()
    base, expected = logits_of(make_model(case).double(), tokens), logits_of(model, tokens)
    folded = logits_of(hfpatch.fold(model), tokens)
    assert (expected - base).abs().max() > 0.1
    assert (folded - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_is_stock_again_and_computes_the_same(case, tmp_path):
    before, tokens = make_model(case), make_tokens()
    model = patched(make_model(case), PreProjectionConfig(activation="identity", layers_to_transform=[1]))
    expected = logits_of(model, tokens)
    with frozen(model):
        hfpatch.fold(model)
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=1e-4, atol=1e-4)
    assert list(model.state_dict()) == list(before.state_dict())
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in before.parameters()]
    stock = before.state_dict().items()
    changed = [name for name, tensor in stock if not torch.equal(tensor, model.state_dict()[name])]
    assert changed
    assert all(".1." in name and name.endswith("weight") for name in changed)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


STACK = [
    LINEAR,
    NonlinearLoraConfig(rank=3, activation="identity", targets=("query", "key", "value", "output")),
    QueryTemperatureConfig(),
    NonlinearQueryConfig(rank=4, activation="identity", input_norm="none", output_norm="none", targets="value"),
    CanonConfig(width=1),
    NonlinearQueryConfig(rank=4, activation="identity", input_norm="none", output_norm="none", form="literal"),
]


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "llama"])
def test_a_stack_of_linear_methods_is_folded_in_the_order_in_which_it_acts(case):
    for stack in (STACK, STACK[::-1]):
        model, tokens = patched(make_model(case).double(), *stack, std=0.3).double(), make_tokens()
        expected = logits_of(model, tokens)
        assert (expected - logits_of(make_model(case).double(), tokens)).abs().max() > 0.1
        folded = logits_of(hfpatch.fold(model), tokens)
        assert (folded - expected).abs().max() <= 1e-6 * expected.abs().max()  # Llama's norms compute in fp32
        assert [name for name, _ in model.named_modules()] == [name for name, _ in make_model(case).named_modules()]


def test_a_temperature_multiplies_its_heads_and_a_lora_adds_its_product():
    model = patched(make_model("llama"), QueryTemperatureConfig(), NonlinearLoraConfig(rank=3, activation="identity"))
    tensors = {n.split(".self_attn.")[-1]: p.detach().clone() for n, p in model.named_parameters() if ".0." in n}
    tau = tensors["hfpatch_scale.temperature_query.query_temperature.weight"]
    parts = {n.split(".")[1].removeprefix("nonlinear_lora_"): t for n, t in tensors.items() if "nonlinear_lora_" in n}
    weights = {name: tensors[f"{name}_proj.weight"] for name in "qv"}
    attention = hfpatch.fold(model).model.layers[0].self_attn
    changed = weights["q"] * (1 + tau).repeat_interleave(8)[:, None] + 2 * parts["query_up"] @ parts["query_down"]
    torch.testing.assert_close(attention.q_proj.weight, changed)
    torch.testing.assert_close(attention.v_proj.weight, weights["v"] + 2 * parts["value_up"] @ parts["value_down"])


def test_the_weights_keep_the_dtype_of_the_base():
    model = patched(make_model("llama", torch.bfloat16))
    expected, tokens = logits_of(model, make_tokens()), make_tokens()
    hfpatch.fold(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (logits_of(model, tokens) - expected).abs().max() < 0.1 * expected.abs().max()


def tied(model):
    attention = model.model.layers[1].self_attn
    attention.k_proj.weight = attention.v_proj.weight
    return model


def gated_beside(model):
    attention = model.model.layers[1].self_attn
    attention.gate_proj = torch.nn.Linear(32, 32)
    return model


def computed_otherwise(model):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[1].self_attn.q_proj.__class__ = Doubled
    return model


def quantised(model):
    projection = model.model.layers[1].self_attn.v_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    return model


def as_it_is(model):
    return model


@pytest.mark.parametrize(
    ("change", "configs", "message"),
    [
        (as_it_is, [PreProjectionConfig()], r"cannot be merged .*: activation='silu' is not linear"),
        (as_it_is, [PreProjectionConfig(activation="identity", gated=True)], "the gate depends on the input"),
        (as_it_is, [PreProjectionConfig(activation="identity", content_skip=True)], "no matrix .* leads from x~ to"),
        (as_it_is, [PreProjectionConfig(expansion=0, content_skip=True)], "no matrix .* leads from x~ to the residual"),
        (as_it_is, [LINEAR, LoraConfig(r=2, target_modules=["o_proj"])], "a peft.tuners.lora.layer.Linear cannot be"),
        (as_it_is, [LINEAR, NonlinearQueryConfig(activation="identity")], "input_norm='rmsnorm' divides by the size"),
        (as_it_is, [LINEAR, OutputGateConfig()], "the output gate cannot be merged .*: the gate depends on the input"),
        (as_it_is, [LoReFTConfig(at="branch")], "o_proj has no bias"),
        (tied, [LINEAR], r"layers\.1\.self_attn\.[kv]_proj: the weight is tied to another parameter"),
        (quantised, [LINEAR], r"v_proj: the weight is not a plain matrix \(quantised, sharded or composed\)"),
        (computed_otherwise, [LINEAR], "q_proj: the weight is not used as a matrix alone by Doubled"),
        (gated_beside, [LINEAR], "gate_proj may read the hidden state besides query, key and value"),
    ],
)
def test_what_cannot_be_folded_is_refused_before_anything_is_changed(change, configs, message):
    model = patched(change(make_model("llama")), *configs)
    with unchanged(model), pytest.raises(HfpatchError, match=message):
        hfpatch.fold(model)


def test_an_inactive_pre_projection_would_be_lost():
    model = hfpatch.patch(make_model("llama"), [LINEAR, LINEAR])
    model.set_adapter("pre_projection")
    with pytest.raises(HfpatchError, match="'pre_projection_2' is not active, and would be lost"):
        hfpatch.fold(model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: make_model("llama"), "the model has no adapter to fold"),
        (lambda: get_peft_model(make_model("llama"), LINEAR), "is wrapped in a PeftModel"),
        (lambda: torch.nn.Linear(2, 2), "Linear is not a transformers model"),
        (lambda: hfpatch.patch(make_model("llama").to("meta"), LINEAR), r"has no values here \(offloaded\)"),
    ],
)
def test_models_without_anything_to_fold(model, message):
    with pytest.raises(HfpatchError, match=message):
        hfpatch.fold(model())
