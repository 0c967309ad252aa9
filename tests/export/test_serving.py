"""What servers do with an export: vLLM builds the base model without values and puts its own classes in its places."""

import sys

import pytest
import torch
import torch.nn.functional as F
from families import hooks_act_as_registered, make_model, make_tokens, perturb
from peft import LoraConfig
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch import NonlinearQueryConfig, PreProjectionConfig, QueryTemperatureConfig
from hfpatch.export.runtime import Matrix, use_onednn
from hfpatch.export.write import write_model
from hfpatch.surgery.budget import attention_modules

FAMILIES = ["gpt_neox", "gpt2", "llama", "gemma2"]
RARER = [pytest.param(case, marks=pytest.mark.slow) for case in FAMILIES[2:]]


class OtherLinear(nn.Module):
    """A linear layer of another class, as servers have."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.quant_method = object()  # what vLLM calls, once, at every module that has it

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class OtherNorm(nn.Module):
    """A norm of another class."""

    def __init__(self, norm):
        super().__init__()
        self.compute = type(norm).forward.__get__(norm)

    def forward(self, x):
        return self.compute(x)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    model = make_model(request.param)
    stack = [
        PreProjectionConfig(gated=True, content_skip=True),
        NonlinearQueryConfig(rank=3, targets=("query", "value")),
        NonlinearQueryConfig(rank=4, form="literal", layers_to_transform=[1]),
        QueryTemperatureConfig(),
        LoraConfig(r=2, target_modules=attention_modules(model)),
    ]
    hfpatch.patch(model, stack)
    perturb(model)
    path = tmp_path_factory.mktemp(request.param)
    write_model(model, path)
    return path


@pytest.fixture
def tower(folder):
    return AutoModel.from_pretrained(folder, trust_remote_code=True).eval().requires_grad_(False)


@torch.no_grad()
def hidden(model, **options):
    return model(make_tokens(2, 7), use_cache=False, **options).last_hidden_state


def test_the_base_model_is_built_without_values_and_has_the_names_of_the_file(folder):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.device("meta"):
        model = AutoModel.from_config(config, trust_remote_code=True)
    assert type(model).__name__ == config.auto_map["AutoModel"].rpartition(".")[2]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with safe_open(folder / "model.safetensors", "pt") as file:
        held = set(file.keys())
    names = {f"{model.base_model_prefix}.{name}" for name in model.state_dict()}
    assert names <= held
    assert all("lm_head" in name or "embed_out" in name for name in held - names)


def test_nothing_is_on_or_in_a_linear_layer_or_a_norm(tower):
    for name, module in tower.named_modules():
        if isinstance(module, nn.Linear) or "norm" in type(module).__name__.lower():
            assert not module._forward_hooks, name
            assert not module._forward_pre_hooks, name
            assert not list(module.children()), name


def test_linear_layers_and_norms_of_other_classes_change_nothing(tower):
    expected, replaced = hidden(tower), []
    for parent in list(tower.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, OtherLinear(child))
            elif "norm" in type(child).__name__.lower():
                setattr(parent, name, OtherNorm(child))
            else:
                continue
            replaced.append(type(child).__name__)
    assert len(replaced) > 4
    assert torch.equal(hidden(tower), expected)
    shown = [module for module in tower.modules() if hasattr(module, "quant_method")]
    assert all(isinstance(module, OtherLinear) for module in shown)


def test_attention_is_the_one_of_the_interface_and_gets_what_is_passed(tower, monkeypatch):
    calls = []

    def attention(module, *states, attention_instances, **options):
        calls.append((module.layer_idx, attention_instances))
        computed, _ = sys.modules[type(module).__module__].eager_attention_forward(module, *states, **options)
        return computed.flatten(2), None  # servers join the heads

    tower.config._attn_implementation = "eager"
    expected = hidden(tower)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "served", attention)
    masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(masks, "served", masks["eager"])
    assert tower._supports_attention_backend
    tower.config._attn_implementation = "served"
    instances = object()
    assert torch.equal(hidden(tower, attention_instances=instances), expected)
    assert calls == [(0, instances), (1, instances)]


@pytest.mark.parametrize("folder", [*FAMILIES[:2], *RARER], indirect=True)
def test_it_compiles_into_one_graph(tower):
    expected = hidden(tower)
    torch.compiler.reset()
    compiled = torch.compile(tower, backend="eager", fullgraph=True)
    assert torch.equal(hidden(compiled), expected)
    torch.compiler.reset()
    assert hooks_act_as_registered(tower)


def test_large_products_use_onednn_where_vllm_serves(folder, tower, monkeypatch):
    calls, module = [], sys.modules[type(tower).__module__]
    monkeypatch.setattr(module, "use_onednn", calls.append)
    for name, times in [("eager", 0), ("vllm", 1)]:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, F.scaled_dot_product_attention)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True, attn_implementation=name)
        AutoModel.from_config(config, trust_remote_code=True)
        assert len(calls) == times


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@torch.no_grad()
def test_onednn_computes_the_same_and_compiles():
    model = nn.Sequential(Matrix(256, 300, bias=True), Matrix(300, 4), Matrix(4, 300))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    x = torch.randn(1, 7, 256)
    expected = model(x)
    use_onednn(model)
    use_onednn(model)  # of another folder
    assert [part.onednn is not None for part in model] == [True, False, False]
    torch.testing.assert_close(model(x), expected)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    torch.compiler.reset()
    torch.testing.assert_close(model.bfloat16()(x.bfloat16()).float(), expected, atol=0.05, rtol=0.1)
