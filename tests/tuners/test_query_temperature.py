"""The query temperature in PEFT's and transformers' calls, and beside other methods on the same query."""

import pytest
import torch
from architectures.catalogue import make
from families import logits_of, make_model, make_tokens, perturb
from peft import HRAConfig, get_peft_model

import hfpatch
from hfpatch import Family, HfpatchError, QueryTemperatureConfig
from hfpatch.sites import heads, separate
from hfpatch.sites.family import DECLARED

MANY = ["gpt_neox", "gpt2", "phi3", "qwen3", "falcon_new_decoder"]  # per head; Conv1D; concatenated; normed; grouped


def temperatures(model):
    return [p for name, p in model.named_parameters() if "temperature_query" in name]


def test_it_is_not_merged_where_a_norm_follows_the_projection():
    with pytest.raises(ValueError, match=r"temperature cannot be merged .*: it acts behind"):
        get_peft_model(make_model("qwen3"), QueryTemperatureConfig()).merge_and_unload()


@pytest.mark.parametrize("case", MANY)
def test_adapters_multiply(case):
    tokens, values = make_tokens(), torch.tensor([0.5, -0.5, 1.0, 0.0])
    once, twice = (hfpatch.patch(make_model(case), [QueryTemperatureConfig()] * n) for n in (1, 2))
    for tau in temperatures(once):
        tau.data.copy_((1 + values) * (1 + values.flip(0)) - 1)
    for index, tau in enumerate(temperatures(twice)):
        tau.data.copy_(values.flip(0) if index % 2 else values)
    torch.testing.assert_close(logits_of(twice, tokens), logits_of(once, tokens), rtol=1e-4, atol=1e-4)


def test_a_method_that_bypasses_the_projection_is_refused_unless_a_norm_follows():
    bypass = HRAConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(HfpatchError, match="hra does not call the projection"):
        hfpatch.patch(make_model("llama"), [QueryTemperatureConfig(), bypass])
    assert hfpatch.patch_summary(hfpatch.patch(make_model("qwen3"), [bypass, QueryTemperatureConfig()])).added > 0


def test_a_norm_of_another_shape_is_an_error_and_no_wrong_result(monkeypatch):
    monkeypatch.setattr(heads, "NORMED_WITH_HEADS_FIRST", {"Qwen3Attention"})
    model = hfpatch.patch(make_model("qwen3"), QueryTemperatureConfig())
    with pytest.raises(HfpatchError, match=r"q_norm returns \(2, 9, 4, 8\), which has no 4 heads at axis 1"):
        logits_of(model, make_tokens())


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_family_declares_a_norm_of_the_query(heads_first, monkeypatch):
    """Of any name, and on heads before or after the sequence."""
    patched = hfpatch.patch(make("phi/query_norm"), QueryTemperatureConfig())
    perturb(patched)
    declared = {"layers": "layers", "attention": "self_attn", "qkv": separate(), "output": "dense", "exit": None}
    family = Family(name="phi", model_types=("phi",), **declared, query_norm="q_layernorm", heads_first=heads_first)
    monkeypatch.setitem(DECLARED, "phi", family)
    monkeypatch.setattr(heads, "QUERY_NORMS", ())
    monkeypatch.setattr(heads, "NORMED_WITH_HEADS_FIRST", set())
    model = hfpatch.patch(make("phi/query_norm"), QueryTemperatureConfig())
    perturb(model)
    if heads_first:
        assert torch.equal(logits_of(model, make_tokens()), logits_of(patched, make_tokens()))
    else:
        with pytest.raises(HfpatchError, match=r"q_layernorm returns .* at axis 2; declare heads_first=True in"):
            logits_of(model, make_tokens())
