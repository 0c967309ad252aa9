"""A folded model is the stock one with other weights, and computes what the patched one computed."""

import pytest
import torch
from families import FAMILIES, FEW, logits_of, make_model, make_tokens, perturb, state_of, unchanged
from peft import LoraConfig, get_peft_model

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


SECOND = {"layers_to_transform": [1]}
PLAIN = {"rank": 4, "activation": "identity", "input_norm": "none", "output_norm": "none", **SECOND}
EVERY = ("query", "key", "value", "output")
STACK = [
    PreProjectionConfig(activation="identity", **SECOND),
    NonlinearLoraConfig(rank=3, activation="identity", targets=EVERY, **SECOND),
    NonlinearQueryConfig(targets="value", **PLAIN),
    PreProjectionConfig(activation="identity", expansion=0.5, **SECOND),
    CanonConfig(width=1, **SECOND),
    NonlinearQueryConfig(form="literal", **PLAIN),
]
BIASED = ("gpt_neox", "gpt2", "opt")  # the output projection has a bias, which LoReFT needs


@pytest.mark.parametrize(("case", "order"), [*((case, 1) for case in FAMILIES), *((case, -1) for case in FEW)])
def test_every_family_is_stock_again_and_computes_what_linear_methods_did_in_their_order(case, order):
    before, tokens = make_model(case).double(), make_tokens()
    has_norm = hfpatch.find_sites(before)[1].heads.norm is not None  # behind the query
    stack = STACK if has_norm else [*STACK, QueryTemperatureConfig(**SECOND)]
    if case.startswith(BIASED):
        stack = [*stack, LoReFTConfig(at="branch", **SECOND)]
    model = patched(make_model(case).double(), *stack[::order], std=0.3).double()
    expected = logits_of(model, tokens)
    assert (expected - logits_of(before, tokens)).abs().max() > 0.1
    assert hfpatch.fold(model) is model
    rounding = 1e-6 if hasattr(model.config, "rms_norm_eps") else 1e-12  # RMSNorms of transformers compute in fp32
    assert (logits_of(model, tokens) - expected).abs().max() <= rounding * expected.abs().max()
    stock, state = state_of(before), state_of(model)
    old, new = stock.pop("state"), state.pop("state")
    assert state == stock
    assert list(new) == list(old)
    changed = [name for name in old if not torch.equal(old[name], new[name])]
    assert changed
    assert all(".1." in name for name in changed)


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
