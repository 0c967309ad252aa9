"""What layers share within one forward pass: what a later layer reads is what earlier ones of the same call left."""

from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from architectures.catalogue import make
from families import gradients, logits_of, make_config, make_model, make_tokens, perturb
from own_methods import forgotten
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch import HfpatchError, MethodConfig, PreProjectionConfig
from hfpatch.tuners import cross_layer
from hfpatch.tuners.adapters import adapter_parameters


class Weight(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


@dataclass
class CarryConfig(MethodConfig):
    """Every layer reads a sum of what all earlier ones have left, and adds to it."""

    def build(self, site, seed):
        return nn.ModuleDict({"carry": Weight(site.hidden_size)})

    def mixed(self, parts, a, x, site):
        carried = site.shared.get("carried", torch.zeros_like(x))
        site.shared["carried"] = carried + x.tanh()
        return a + parts["carry"].weight * carried


@dataclass
class UndeclaredConfig(CarryConfig):
    """It shares, and does not say so."""


@dataclass
class ReaderConfig(CarryConfig):
    """It reads what nobody wrote."""

    def mixed(self, parts, a, x, site):
        return a + site.shared["nothing"]


@pytest.fixture(autouse=True, scope="module")
def _registered():
    """For these tests alone: others list what is registered."""
    with forgotten():
        for cls, shares in ((CarryConfig, True), (UndeclaredConfig, False), (ReaderConfig, True)):
            hfpatch.method(cls.__name__.lower(), shares=shares)(cls)
        yield


def carrying(case="llama", **changes):
    """A model of three layers, in the first of which other parameters are trained, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(case, num_hidden_layers=3, **changes)).eval()
    hfpatch.patch(model, [PreProjectionConfig(), CarryConfig(), CarryConfig()])
    perturb(model, std=0.3)
    return model


def checkpoint_functions(model):
    """What transformers was given to checkpoint by, which an unpatched model has back."""
    modules = [vars(module) for module in model.modules()]
    return [held["_gradient_checkpointing_func"] for held in modules if "_gradient_checkpointing_func" in held]


@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_checkpointing_of_both_kinds_gives_the_same_gradients(case):
    """Those of what a layer left go through the layers that read it, and through the one that left it."""
    model, tokens = carrying(case).train(), make_tokens()
    expected, functions = gradients(model, tokens), []
    model.enable_input_require_grads()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        functions = checkpoint_functions(model)
        torch.testing.assert_close(gradients(model, tokens), expected, rtol=1e-4, atol=1e-6)
        assert not cross_layer.PASSES.stack
    other = model(make_tokens(seed=1), use_cache=False).logits.sum()  # a second graph meanwhile
    gradients(model, tokens)
    model.zero_grad()
    other.backward()
    late = {name: p.grad.clone() for name, p in adapter_parameters(model).items()}
    model.zero_grad()
    model(make_tokens(seed=1), use_cache=False).logits.sum().backward()
    alone = {name: p.grad for name, p in adapter_parameters(model).items()}
    torch.testing.assert_close(late, alone, rtol=1e-4, atol=1e-6)
    hfpatch.unpatch(model)
    assert checkpoint_functions(model) == functions


@pytest.mark.parametrize(
    ("kind", "config"), [("gemma3n_text", CarryConfig), ("gemma4_text/kv_shared", PreProjectionConfig)]
)
def test_reentrant_checkpoints_are_refused_where_a_layer_reads_the_keys_of_another_one(kind, config):
    """The base computes these keys without gradients then; with ``use_reentrant=False`` they go through them."""
    model, tokens = hfpatch.patch(make(kind), config()).train(), make_tokens()
    expected = gradients(model, tokens)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(HfpatchError, match=r"layer 2 reads keys .*_enable\(\{\"use_reentrant\": False\}\)"):
        gradients(model, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(model, tokens), expected, rtol=1e-4, atol=1e-6)


def test_blocks_that_something_else_checkpoints_are_refused():
    model, tokens = carrying().train(), make_tokens()
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(block)
    loss = model(tokens, labels=tokens, use_cache=False).loss
    with pytest.raises(HfpatchError, match="checkpoint its blocks by gradient_checkpointing_enable"):
        loss.backward()
    assert not cross_layer.PASSES.stack


def test_calls_inside_and_between_other_calls():
    """A module of the model calls the model; the inner model is called alone, as users and PEFT do; another one too."""
    model, other, tokens = carrying(), carrying("gpt_neox"), make_tokens()
    expected = logits_of(model, tokens)
    inside = []

    def call(module, args, output):
        if not inside:
            inside.append(True)
            inside.extend(logits_of(called, make_tokens(3, 4, seed=2)) for called in (model, other))

    handle = model.model.layers[1].self_attn.register_forward_hook(call)
    assert torch.equal(logits_of(model, tokens), expected)
    handle.remove()
    assert torch.equal(inside[1], logits_of(model, make_tokens(3, 4, seed=2)))
    assert torch.equal(inside[2], logits_of(other, make_tokens(3, 4, seed=2)))
    with torch.no_grad():
        assert torch.equal(model.lm_head(model.model(tokens, use_cache=False).last_hidden_state), expected)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_fails_in_the_middle_changes_no_later_one(kind):
    model, tokens = carrying().train(), make_tokens()
    expected = gradients(model, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def stop(*_):
        raise kind

    for path in ("model.layers.0.self_attn", "model.layers.1.self_attn.o_proj", "model.layers.2", "model.norm"):
        handle = model.get_submodule(path).register_forward_hook(stop)
        with suppress(kind):
            model(make_tokens(3, 4, seed=5), use_cache=False)
        handle.remove()
        assert kind is KeyboardInterrupt or not cross_layer.PASSES.stack, path  # torch runs no hooks then
        torch.testing.assert_close(gradients(model, tokens), expected, rtol=1e-4, atol=1e-6)
    cross_layer.PASSES.stack.clear()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (UndeclaredConfig, "site.shared exists while the whole model runs, for a method registered with shares=True"),
        (ReaderConfig, r"site.shared\['nothing'\]: no earlier layer left it in this forward pass"),
    ],
)
def test_what_cannot_be_shared_is_said(config, says):
    model = hfpatch.patch(make_model("llama"), config())
    with pytest.raises(HfpatchError, match=says):
        logits_of(model, make_tokens())
    assert not cross_layer.PASSES.stack


def test_a_block_that_is_called_alone_shares_nothing():
    model = hfpatch.patch(make_model("gpt2"), CarryConfig())
    with pytest.raises(HfpatchError, match=r"site\.shared exists while the whole model runs"):
        model.transformer.h[1](torch.zeros(1, 2, model.config.hidden_size))
