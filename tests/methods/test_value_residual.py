"""The value residual: which layers take it, counts by hand, what it reads, several adapters, exports, devices."""

from dataclasses import replace

import elsewhere
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from architectures.catalogue import make
from architectures.further import apply_value_residual, check
from architectures.places import sites_of
from families import logits_of, make_config, make_tokens, perturb
from simulated_device import CUDA, simulated_device
from transformers import AutoConfig, AutoModelForCausalLM, HrmTextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, ValueResidualConfig
from hfpatch.analysis.ablation import ablate_layers
from hfpatch.export.write import write_model
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.places import method_site
from hfpatch.twins import random_model, shrink


def deep(layers=4):
    """Layers with two key/value heads of eight columns."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config("llama", num_hidden_layers=layers)).eval()


def with_other_widths():
    """The values of the second of three layers are twice as wide."""
    model = deep(3)
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (torch.nn.Linear(model.config.hidden_size, 32) for _ in range(2))
    attention.num_key_value_groups = 1
    return model


def with_loops():
    """Two lists of two blocks each, which run several times in one call."""
    config = shrink(HrmTextConfig())
    config.num_layers_per_stack = 2
    config.num_hidden_layers = 2 * config.H_cycles * (config.L_cycles + 1)
    return random_model(config)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {1: 1, 2: 1, 3: 1}),
        ({"per_head": True}, {1: 2, 2: 2, 3: 2}),
        ({"layers_to_transform": [3, 1]}, {3: 1}),
        ({"layers_to_transform": range(2), "per_head": True}, {1: 2}),
    ],
)
def test_the_first_layer_has_no_parameters(options, expected):
    model = hfpatch.patch(deep(), ValueResidualConfig(**options))
    assert hfpatch.patch_summary(model).per_layer == expected


def test_a_share_of_one_gives_later_layers_the_first_chosen_ones_value():
    model, values = hfpatch.patch(deep(), ValueResidualConfig(layers_to_transform=[1, 2, 3])), {}
    for parameter in adapter_parameters(model).values():
        torch.nn.init.ones_(parameter)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.v_proj.register_forward_hook(lambda m, args, out, index=index: values.update({index: out}))
    logits_of(model, make_tokens())
    assert torch.allclose(values[2], values[1], atol=1e-6)
    assert torch.allclose(values[3], values[1], atol=1e-6)
    assert not torch.allclose(values[1], values[0], atol=1e-2)


@pytest.mark.parametrize(
    ("make_one", "layers", "says"),
    [
        (deep, 2, "value_residual has no parameters in the only layer that it would change; it needs more"),
        (lambda: make("deepseek_v2"), None, "DeepseekV2Attention has no projection that computes the value alone"),
        (lambda: make("reformer/local"), None, "an autograd function of the model recomputes its blocks"),
        (with_other_widths, [0, 1], "layer 1 cannot be changed: its value has 32 columns, that of layer 0, .* 16"),
        (with_loops, [0, 2], r"of layer 0 is of another list of blocks, model\.L_module\.layers, not model\.H"),
    ],
)
def test_what_does_not_take_it_is_refused_before_anything_changes(make_one, layers, says):
    model = make_one()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(HfpatchError, match=says):
        hfpatch.patch(model, ValueResidualConfig(layers_to_transform=layers))
    assert [name for name, _ in model.named_modules()] == names


def test_layers_of_another_width_are_left_out():
    model = hfpatch.patch(with_other_widths(), ValueResidualConfig())
    summary = hfpatch.patch_summary(model)
    assert summary.per_layer == {2: 1}
    assert summary.skipped == {1: "its value has 32 columns, that of layer 0, which would be added, 16"}


def test_blocks_that_run_several_times_read_the_latest_value():
    model, twin, tokens = with_loops(), with_loops(), make_tokens()
    hfpatch.patch(model, ValueResidualConfig())
    assert hfpatch.patch_summary(model).per_layer == {1: 1}
    perturb(model, std=0.5)
    share = next(iter(adapter_parameters(model).values())).detach()
    first, second, *_ = sites_of("hrm_text", twin)
    apply_value_residual(twin, first, {})
    plain = logits_of(with_loops(), tokens)
    apply_value_residual(twin, second, {"mix": share})
    expected = logits_of(twin, tokens)
    assert torch.allclose(logits_of(model, tokens), expected, atol=1e-5)
    assert not torch.allclose(plain, expected, atol=1e-3)


def test_a_model_that_clips_its_values_in_place():
    check("olmo/clipped", "value residual")


def adapters_on_other_layers():
    """Two value residuals, the first of one reading nothing of the other, and a nonlinear value below them."""
    model = deep()
    parts = [
        NonlinearQueryConfig(targets=("value",)),
        ValueResidualConfig(),
        ValueResidualConfig(per_head=True, layers_to_transform=[1, 3]),
    ]
    hfpatch.patch(model, parts, names=["below", "one", "two"])
    perturb(model, std=0.3)
    return model


def test_adapters_share_with_themselves_alone():
    model, tokens = adapters_on_other_layers(), make_tokens()
    assert not torch.allclose(logits_of(model, tokens), logits_of(deep(), tokens), atol=1e-3)
    model.set_adapter("two")
    alone = logits_of(model, tokens)
    model.set_adapter("one")
    model.delete_adapter("one")  # the next one acts in its place, in every layer
    model.delete_adapter("below")
    model.set_adapter("two")
    assert torch.equal(logits_of(model, tokens), alone)


def test_an_ablation_leaves_the_layer_that_the_others_read():
    model, tokens = hfpatch.patch(deep(3), ValueResidualConfig()), make_tokens(4)
    perturb(model, std=0.3)
    ablations = ablate_layers(model, lambda ablated: logits_of(ablated, tokens).mean((1, 2)).tolist())
    assert [ablation.layer for ablation in ablations.without] == [1, 2, None]
    assert ablations.without[-1].score == pytest.approx(float(logits_of(deep(3), tokens).mean()), abs=1e-6)
    assert ablations.score != ablations.without[-1].score


def test_an_export_of_adapters_on_other_layers_which_vllm_refuses(tmp_path, monkeypatch):
    model, tokens = adapters_on_other_layers(), make_tokens(2, 6)
    expected = logits_of(model, tokens)
    write_model(model, tmp_path)
    computed, _ = elsewhere.computed(tmp_path, tokens)
    assert torch.equal(computed["logits"], expected)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", ALL_ATTENTION_FUNCTIONS["sdpa"])
    with pytest.raises(ValueError, match=r"value_residual passes tensors .*, which vLLM does not make"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="vllm")


def test_a_value_of_another_device_is_moved_to_where_it_is_read():
    model, tokens = hfpatch.patch(deep(3), ValueResidualConfig()), make_tokens()
    perturb(model, std=0.3)
    expected = logits_of(model, tokens)
    with simulated_device():
        for layer in model.model.layers[1:]:  # as accelerate.dispatch_model places blocks on several devices
            layer.to("cuda")
            add_hook_to_module(layer, AlignDevicesHook("cuda", io_same_device=True))
        for parameter in adapter_parameters(model).values():
            assert parameter.device == CUDA
        actual = logits_of(model, tokens)
    assert torch.allclose(actual, expected, atol=1e-5)


def test_key_value_heads_have_to_be_known_to_get_one_each():
    with pytest.raises(HfpatchError, match="layer 1: the architecture does not say how many query heads it has"):
        hfpatch.patch(make("jetmoe"), ValueResidualConfig(per_head=True))
    unknown = replace(method_site(hfpatch.find_sites(deep())[1]), mixed_size=None)
    with pytest.raises(HfpatchError, match=r"layer 1: .* how many key/value heads it has; leave per_head out"):
        ValueResidualConfig(per_head=True).build(unknown, 0)
