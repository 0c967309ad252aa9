"""Adapters in the weights of the base: in which order, one after the other, and beside others."""

import copy
from operator import methodcaller

import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb
from own_methods import defined, forgotten, low_rank
from peft import LoraConfig, get_peft_model

import hfpatch
from hfpatch import CanonConfig, HfpatchError, NonlinearLoraConfig, PreProjectionConfig, QueryTemperatureConfig

LINEAR = {
    "pre": lambda **options: PreProjectionConfig(activation="identity", expansion=0.5, **options),
    "lora": lambda **options: NonlinearLoraConfig(rank=3, activation="identity", **options),
    "temperature": QueryTemperatureConfig,
    "canon": lambda **options: CanonConfig(width=1, at="qkv", **options),
}


def trained(kind, case="gpt2"):
    """A model with two adapters that act one after the other."""
    model = get_peft_model(make_model(case), LINEAR[kind]()).double().eval()
    model.add_adapter("second", LINEAR[kind](seed=1))
    model.base_model.set_adapter(["default", "second"])
    perturb(model, std=0.3)
    return model.double()


def close(a, b):
    return (a - b).abs().max() <= 1e-9 * b.abs().max()


@pytest.mark.parametrize("kind", LINEAR)
def test_adapters_merge_in_the_order_in_which_they_act_however_they_are_named(kind):
    model, tokens = trained(kind), make_tokens()
    base, expected = logits_of(make_model("gpt2").double(), tokens), logits_of(model, tokens)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.merge_adapter(["second"])
    only_second = logits_of(model, tokens)
    with pytest.warns(UserWarning, match="additionally merging default"):
        model.merge_adapter(["default"])
    assert close(logits_of(model, tokens), expected)
    assert not close(only_second, expected)
    model.unmerge_adapter()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    model.base_model.set_adapter(["second"])
    assert close(only_second, logits_of(model, tokens))
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    with merged.disable_adapter():
        assert torch.equal(logits_of(merged, tokens), base)
    merged.merge_adapter()
    assert torch.equal(logits_of(merged.unload(), tokens), base)  # PEFT's own would leave the merged weights
    assert close(logits_of(model.merge_and_unload(adapter_names=["default", "second"]), tokens), expected)


def test_a_broken_adapter_is_not_merged_safely():
    model = get_peft_model(make_model("llama"), LINEAR["pre"]())
    perturb(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layer = model.base_model.model.model.layers[1].self_attn.hfpatch_pre_projection
    layer.preproj_down.default.weight.data[0] = torch.nan
    for merge in (layer.merge, model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"NaNs detected in the merged weights\. The adapter default"):
            merge(safe_merge=True)
        after = model.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if "preproj_" not in name)


def test_one_kind_is_not_merged_under_another():
    """LoRA's own matrices would go on to read what no longer passes the pre-projection."""
    model = make_model("llama")
    model.add_adapter(LINEAR["pre"](), adapter_name="pre")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="lora")
    layer = model.model.layers[0].self_attn.hfpatch_pre_projection
    with pytest.raises(HfpatchError, match="layer 0: other adapters act beside the pre-projection"):
        layer.merge(adapter_names=["pre"])


def test_merged_adapters_are_not_unpatched_folded_scaled_saved_or_deleted(tmp_path):
    """A patch names the base by its weights, which would be the merged ones."""
    model = hfpatch.patch(make_model("llama"), LINEAR["lora"]())
    for module in model.modules():
        if isinstance(module, hfpatch.tuners.MethodLayer):
            module.merge()
    for call, *options in (
        (hfpatch.unpatch,), (hfpatch.fold,), (hfpatch.scale_patch, 1), (hfpatch.save_patch, tmp_path / "patch"),
        (methodcaller("save_pretrained", tmp_path / "patch"),),
    ):  # fmt: skip
        with pytest.raises(HfpatchError, match=r"is merged .*; call unmerge_adapter\(\) first"):
            call(model, *options)
    assert not [*tmp_path.iterdir()]
    wrapped = get_peft_model(make_model("llama"), LINEAR["lora"]())
    wrapped.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        wrapped.delete_adapter("default")


@pytest.mark.parametrize("stage", ["mixed", "left"])
def test_what_no_matrix_computes_is_not_merged(stage):
    def act(self, parts, value, x, site):
        return value + parts["b"](parts["a"](x))

    with forgotten():
        members = {"query": None, stage: act, "unmergeable": lambda self: None}
        members["build"] = lambda self, site, seed: low_rank(site, seed, site.hidden_size)
        model = hfpatch.patch(make_model("llama"), defined(**members)())
        perturb(model)
        with pytest.raises(HfpatchError, match="no matrix leads from what enters the attention to where it acts"):
            hfpatch.fold(model)


@pytest.mark.parametrize("stage", ["entered", "mixed", "output"])
def test_a_constant_term_is_merged_into_the_bias(stage):
    def act(self, parts, value, *others):
        return value + parts["b"](parts["a"](value)) + parts["b"].weight.sum(dim=1)

    tokens = make_tokens()
    with forgotten():
        members = {"query": None, stage: act, "unmergeable": lambda self: None}
        members["build"] = lambda self, site, seed: low_rank(site, seed, site.hidden_size)
        model = hfpatch.patch(make_model("gpt2").double(), defined(**members)()).double()
        perturb(model, std=0.3)
        expected = logits_of(model, tokens)
        assert close(logits_of(hfpatch.fold(model), tokens), expected)


def test_only_a_method_that_says_so_and_is_affine_is_merged():
    assert "does not say that it is linear" in hfpatch.MethodConfig.unmergeable(None)
    members = {
        "unmergeable": lambda self: None,
        "query": lambda self, parts, q, x, site: q + parts["b"](parts["a"](x).relu()),
    }
    with forgotten():
        model = hfpatch.patch(make_model("llama"), defined(**members)())
        perturb(model)
        with pytest.raises(HfpatchError, match=r"q_proj: the method is not affine, although unmergeable\(\) .* None"):
            hfpatch.fold(model)
