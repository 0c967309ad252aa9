"""Rounding is measured: what other kernels may change passes, however ill-conditioned a model; defects do not."""

import itertools
import math
import re

import pytest
import torch
from architectures.catalogue import make
from families import HIDDEN, make_model, make_tokens
from own_methods import defined, forgotten, leaking
from torch import nn
from transformers import LlamaForCausalLM

import hfpatch
from hfpatch import PreProjectionConfig
from hfpatch.promises import behaviour, common
from hfpatch.promises.common import compared, moved, rounded_at_random
from hfpatch.tuners.adapters import adapter_parameters

PADDING, CACHE, CHECKPOINTS, COMPILE, CAUSAL = (
    "left padding", "generation with and without cache", "gradient checkpointing", "torch.compile", "causality",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch, only):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_(model, backend="eager"))
    only(PADDING, CACHE, CHECKPOINTS, COMPILE, CAUSAL)


class Amplifier(nn.Module):
    """Subtracts nearly equal numbers, as ill-conditioned models do: rounding errors grow by ``factor``."""

    def __init__(self, inner, factor):
        super().__init__()
        self.inner, self.shift, self.factor = inner, nn.Identity(), factor

    def forward(self, hidden):
        out = self.inner(hidden)
        return self.shift(out + self.factor) - self.factor


def failures(model, config=None):
    return {verdict.promise: verdict.measured for verdict in hfpatch.check(model, config).verdicts if not verdict.holds}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unit_of_rounding_at_random(dtype):
    """Of one linear layer: each output is off by at most eps of itself, at random, and the same in every call."""
    layer, x = nn.Linear(64, 500).to(dtype), torch.randn(4, 64).to(dtype)
    plain, eps = layer(x), torch.finfo(dtype).eps
    with rounded_at_random(layer):
        first = layer(x)
    with rounded_at_random(layer):
        again = layer(x)
    assert torch.equal(first, again)
    assert torch.equal(layer(x), plain)
    off = (first.double() - plain.double()) / plain.double().abs()
    assert 0.5 * eps < off.abs().max() < 2 * eps
    assert abs(off.mean()) < 0.1 * eps
    assert not layer._forward_hooks


@pytest.mark.parametrize("factor", [1e2, 1e4])
@torch.no_grad()
def test_what_is_measured_grows_with_the_condition_of_the_model(factor):
    """y = (Wx + c) − c rounds Wx + c to eps·c, so that y is off by eps·c/|y| in all."""
    linear, x = nn.Linear(16, 200, bias=False), torch.randn(3, 16)
    model = Amplifier(linear, factor)
    comparison = compared(model, lambda: model(x), lambda: linear(x))
    expected = torch.finfo(torch.float32).eps * factor / float(linear(x).abs().max())
    assert 0.5 * expected < comparison.rounding / common.UNITS < 2 * expected
    assert comparison.is_rounding
    assert 0.1 * expected < comparison.difference


def test_the_largest_of_several_tensors_is_in_comparison_with_its_own_rounding():
    tensors = {"large": torch.full((1,), 100.0), "small": torch.ones(1)}
    other = {"large": torch.full((1,), 100.5), "small": torch.full((1,), 1.001)}
    model = nn.ModuleDict({"large": Amplifier(nn.Identity(), 1e5), "small": nn.Identity()})

    def one():
        return {name: model[name](tensor) for name, tensor in tensors.items()}

    comparison = compared(model, one, lambda: tensors, lambda: other)
    assert comparison.difference == pytest.approx(0.001, rel=1e-3)
    assert not comparison.is_rounding


def test_a_value_that_is_no_number_is_not_rounding():
    tensors = {"first": torch.ones(1), "second": torch.ones(1)}
    broken = {**tensors, "second": torch.full((1,), math.nan)}
    comparison = compared(nn.Identity(), lambda: tensors, lambda: broken)
    assert not comparison.is_rounding


def test_matrices_multiply_the_size_of_their_input_by_the_gain_at_most():
    model = hfpatch.patch(make_model("llama"), PreProjectionConfig(expansion=40))
    (down, *_) = [p for name, p in adapter_parameters(model).items() if "down" in name]
    assert down.shape == (HIDDEN, 40 * HIDDEN)
    for gain, expected in ((math.inf, 0.1), (0.5, 0.5 / math.sqrt(40 * HIDDEN))):
        before = down.detach().clone()
        moved(model, std=0.1, gain=gain)
        assert (down - before).std().item() == pytest.approx(expected, rel=0.05)


def ill_conditioned(factor=3e4):
    model = make_model("llama")
    for layer in model.model.layers:
        layer.mlp = Amplifier(layer.mlp, factor)
    return model


@pytest.fixture
def other_kernels(monkeypatch):
    """Let padded and shorter rows, caches and recomputed layers be computed by kernels that round otherwise."""
    logits, seeds = common.logits, itertools.count()

    def rounded(model, inputs, **options):
        if not options and inputs["input_ids"].shape[1] == common.LENGTH:
            return logits(model, inputs)
        torch.manual_seed(next(seeds))
        with rounded_at_random(model):
            return logits(model, inputs, **options)

    monkeypatch.setattr(behaviour, "logits", rounded)


@pytest.mark.usefixtures("other_kernels")
def test_rounding_of_an_ill_conditioned_model_is_none_of_the_patch_s():
    """SmolLM2-135M with a pre-projection of random values differs by 1.3e-4 between two of a processor's kernels."""
    report = hfpatch.check(ill_conditioned())
    assert report.passed, str(report)
    (measured,) = [verdict.measured for verdict in report.verdicts if verdict.promise == PADDING]
    assert "the model itself" not in measured
    assert float(measured.split()[2].rstrip(";")) > 1e-4


def recomputed(self, parts, q, x, site):
    """A method that computes something else without gradients, as in the first pass of reentrant checkpoints."""
    return q + parts["b"](parts["a"](x)) * (1.05 if torch.is_grad_enabled() else 1)


def again(self, parts, q, x, site):
    """A method that computes something else in the backward pass, where checkpoints of both kinds recompute."""
    return q + parts["b"](parts["a"](x)) * (1.05 if torch._C._current_graph_task_id() >= 0 else 1)


def compiling(self, parts, q, x, site):
    return q + parts["b"](parts["a"](x)) * (2 if torch.compiler.is_compiling() else 1)


DEFECTS = {
    "leaking": (leaking, {PADDING, CACHE, CAUSAL}),
    "recomputed": (recomputed, {CHECKPOINTS}),
    "compiling": (compiling, {COMPILE}),
}


@pytest.mark.parametrize("model", [make_model, lambda case: ill_conditioned(1e3)], ids=["well", "ill"])
@pytest.mark.parametrize("what", DEFECTS)
def test_defects_are_more_than_rounding(what, model, only):
    query, broken = DEFECTS[what]
    if what != "compiling":  # which takes a second
        only(PADDING, CACHE, CHECKPOINTS, CAUSAL)
    with forgotten():
        assert failures(model("llama"), defined(query=query)()).keys() == broken


@pytest.mark.parametrize("row", [[5, 6] * 5, [5, 6] * 4, [*range(3, 8), *[5] * 4]], ids=["odd", "even", "equal last"])
def test_the_future_is_another_one_whatever_tokens_are_given(row, only):
    only(CAUSAL)
    inputs = torch.tensor([row, row])
    with forgotten():
        (verdict,) = hfpatch.check(make_model("llama"), defined(query=leaking)(), inputs=inputs).verdicts
    assert not verdict.holds, verdict.measured
    (verdict,) = hfpatch.check(make_model("llama"), inputs=inputs).verdicts
    assert verdict.holds, verdict.measured
    assert "not apply" not in verdict.measured


def test_what_a_model_does_not_do_itself_when_compiled_does_not_apply():
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda *call: call[-1] * (2 if torch.compiler.is_compiling() else 1))
    holds, measured = behaviour.compiled(model, PreProjectionConfig(), {"input_ids": make_tokens()})
    assert holds
    assert re.match(r"does not apply: the model itself does not, without hfpatch: logits differ by \d", measured)


def ignoring(self, *args, past_key_values=None, use_cache=False, **kwargs):
    return LlamaForCausalLM.forward(self, *args, use_cache=False, **kwargs)


def raising(self, parts, q, x, site):
    raise ValueError("no query today")


@pytest.mark.parametrize(
    ("cut", "message", "excused"),
    [
        (
            LlamaForCausalLM.prepare_inputs_for_generation,
            "itself does not, without hfpatch: logits of 6 greedy tokens",
            True,
        ),
        (
            lambda self, input_ids, attention_mask, **kwargs: {"input_ids": input_ids},
            "reads all tokens again at every step, with use_",
            False,
        ),
    ],
    ids=["reads the last token alone", "reads all tokens"],
)
def test_a_base_that_ignores_its_cache_is_said(cut, message, excused):
    """A patch without generation fails where the base generates, whatever the base does with its cache."""
    model, inputs = make_model("llama"), {"input_ids": make_tokens()}
    model.__class__ = type("Ignoring", (LlamaForCausalLM,), {"forward": ignoring, "prepare_inputs_for_generation": cut})
    holds, measured = behaviour.cache(model, PreProjectionConfig(), inputs)
    assert holds
    assert measured.startswith("does not apply: ")
    assert message in measured
    with forgotten():
        holds, measured = behaviour.cache(model, defined(query=raising)(), inputs)
    assert holds == excused, measured


def test_each_kind_of_checkpointing_is_excused_by_itself():
    """Reentrant checkpoints of Gemma 4 lose gradients without hfpatch; a defect in the other kind still shows."""
    inputs, right = {"input_ids": make_tokens()}, PreProjectionConfig()
    holds, measured = behaviour.checkpointing(make("gemma4_text/kv_shared"), right, inputs)
    assert holds
    assert re.search(r"^gradients differ by .* use_reentrant=False; .*; does not apply.* use_reentrant=True$", measured)
    with forgotten():
        holds, measured = behaviour.checkpointing(make("gemma4_text/kv_shared"), defined(query=again)(), inputs)
    assert not holds, measured


def test_tokens_after_a_tie_are_not_compared(monkeypatch):
    """Two runs whose logits tie to rounding go different ways; what follows is of other tokens."""
    model = make_model("llama")
    generate, turn = model.generate, itertools.count()

    def another(tokens, **options):
        output = generate(tokens, **options)
        if next(turn) % 3 == 2:  # the one with a cache
            output.sequences[:, tokens.shape[1] + 2 :] += 1
            output.logits = (*output.logits[:3], *(step + 1 for step in output.logits[3:]))
        return output

    monkeypatch.setattr(model, "generate", another)
    holds, measured = behaviour.cache(model, PreProjectionConfig(), {"input_ids": make_tokens()})
    assert holds, measured
    assert "the model itself" not in measured
