"""The products of linear layers by either library, against the formula in fp64."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from hfpatch.errors import HfpatchError
from hfpatch.nn import matmul
from hfpatch.nn.matmul import choose_library, fast_matmul, linear
from hfpatch.support import cpu
from hfpatch.support.cpu import active_library, has_onednn, pinned_library

onednn = pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
INPUTS = {
    "a vector": lambda: torch.randn(32),
    "rows": lambda: torch.randn(3, 32),
    "batch": lambda: torch.randn(2, 5, 32),
    "transposed": lambda: torch.randn(32, 7).t(),
    "expanded": lambda: torch.randn(1, 32).expand(5, 32),
    "strided": lambda: torch.randn(5, 64)[:, ::2],
    "batch of one column": lambda: torch.randn(2, 5, 32)[:, :1],
}
WEIGHTS = {
    "plain": lambda: torch.randn(48, 32),
    "transposed": lambda: torch.randn(32, 48).t(),
    "strided": lambda: torch.randn(48, 64)[:, ::2],
}
BIASES = {"no bias": lambda: None, "bias": lambda: torch.randn(48), "strided bias": lambda: torch.randn(96)[::2]}


@pytest.fixture
def asked(monkeypatch):
    """The shapes of the inputs of oneDNN's products."""
    shapes, stock = [], matmul._onednn
    monkeypatch.setattr(matmul, "_onednn", lambda *values: shapes.append(values[0].shape) or stock(*values))
    return shapes


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), Conv1D(16, 48), nn.Linear(16, 8, bias=False))


class Weights(TorchDispatchMode):
    """Refuses weights with which oneDNN takes hundreds of times as long."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            assert args[1].is_contiguous() or args[1].t().is_contiguous()
        return func(*args, **kwargs or {})


@onednn
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("x", INPUTS)
def test_products_and_gradients_are_those_of_the_formula(x, weight, bias):
    torch.manual_seed(0)
    values = [INPUTS[x](), WEIGHTS[weight](), BIASES[bias]()]
    inputs = [None if value is None else value.requires_grad_() for value in values]
    exact = [None if value is None else value.detach().double().requires_grad_() for value in values]
    with Weights(), fast_matmul(nn.Linear(1, 1), library="onednn"):
        actual = linear(*inputs)
    expected = exact[0] @ exact[1].T if exact[2] is None else exact[0] @ exact[1].T + exact[2]
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    outer = torch.randn(actual.shape)
    with Weights():
        actual.backward(outer)
    expected.backward(outer.double())
    for value, reference in zip(inputs, exact, strict=True):
        if value is not None:
            torch.testing.assert_close(value.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


def test_a_model_computes_the_same_inside_and_is_as_before_afterwards():
    net, x = model(), torch.randn(2, 5, 32)
    net[0].weight.requires_grad_(False)
    libraries = []
    net[3].register_forward_hook(lambda module, args, output: libraries.append(active_library()) or output * 2)
    net(x).sum().backward()
    stock, gradients = net(x), [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with fast_matmul(net, library="onednn") as library:
        assert library == active_library() == "onednn"
        assert all("forward" in vars(module) for module in net if not isinstance(module, nn.Tanh))
        inside = net(x)
        inside.sum().backward()
    torch.testing.assert_close(inside, stock, rtol=1e-5, atol=1e-5)
    assert libraries == ["mkl", "mkl", "onednn"]  # hooks act as before
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-5)
    assert active_library() == "mkl"
    assert not any("forward" in vars(module) for module in net)


@onednn
def test_oneDNN_really_computes_the_products(asked):
    net = model().requires_grad_(False)
    with fast_matmul(net, library="onednn"), torch.no_grad():
        net(torch.randn(4, 32))
    assert asked == [(4, 32), (4, 48), (4, 16)]


@onednn
def test_what_is_not_plain_computes_as_before(asked):
    class Other(nn.Linear):
        pass

    replaced = nn.Linear(32, 32)
    replaced.forward = lambda x: x + 1
    parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    net = nn.ModuleList([Other(32, 32), replaced, parametrized, nn.Linear(32, 32).bfloat16(), nn.Linear(32, 32)])
    x = torch.randn(3, 32)
    with fast_matmul(net, library="onednn"):
        for module in net[:3]:
            module(x)
        net[3](x.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert net[4](x).dtype == torch.bfloat16
        net[4](x[:0])
        assert asked == []
        net[4](x)
        assert asked == [(3, 32)]


def test_a_copy_made_inside_is_of_its_own():
    net = model()
    with fast_matmul(net, library="onednn" if has_onednn() else "mkl"):
        twin = copy.deepcopy(net)
        with torch.no_grad():
            twin[0].weight.zero_()
            twin[0].bias.zero_()
        assert not twin[0](torch.ones(32)).any()
        assert net[0](torch.ones(32)).any()


@onednn
@pytest.mark.parametrize(("gain", "chosen"), [(1.5, "onednn"), (1.05, "mkl")])
def test_a_gain_of_a_tenth_decides(monkeypatch, gain, chosen):
    monkeypatch.delenv("HFPATCH_MATMUL", raising=False)
    monkeypatch.setattr(cpu, "measured_gain", lambda *_: gain)
    assert choose_library(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 128))) == chosen
    assert choose_library(nn.Linear(8, 8)) == "mkl"  # too small for a gain
    assert choose_library(nn.Linear(8, 8, device="meta")) is None


@onednn
def test_measuring_is_done_once(monkeypatch):
    monkeypatch.delenv("HFPATCH_MATMUL", raising=False)
    net = nn.Linear(768, 3072)
    cpu.measured_gain.cache_clear()
    assert choose_library(net) == choose_library(net)
    assert cpu.measured_gain.cache_info()[:2] == (1, 1)  # hits and misses


@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv"])
@pytest.mark.parametrize("library", ["bf16", "fp32"])
def test_products_of_bf16_values_are_those_of_the_formula_rounded_once(library, conv):
    """Both sum in fp32 and round to bf16, by at most 2^-9 of the value."""
    torch.manual_seed(0)
    net = (Conv1D(48, 32) if conv else nn.Linear(32, 48)).bfloat16()
    x = torch.randn(5, 32).bfloat16().requires_grad_()
    with fast_matmul(net, library=library):
        actual = net(x)
        outer = torch.randn(actual.shape).bfloat16()
        actual.backward(outer)
    exact, weight, bias = (value.detach().double().requires_grad_() for value in (x, net.weight, net.bias))
    expected = exact @ (weight if conv else weight.T) + bias
    expected.backward(outer.double())
    pairs = ((actual, expected), (x.grad, exact.grad), (net.weight.grad, weight.grad), (net.bias.grad, bias.grad))
    for value, reference in pairs:
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.double(), reference, rtol=2**-8, atol=2e-2)  # sums of terms near 1 cancel


@onednn
def test_in_a_bf16_model_bf16_products_stay_native_and_fp32_ones_take_onednn(asked):
    net = nn.ModuleList([nn.Linear(32, 48).bfloat16(), nn.Linear(32, 16)]).requires_grad_(False)
    x, y = torch.randn(3, 32), torch.randn(4, 32)
    for library, expected in (("bf16", [(4, 32)]), ("fp32", [(3, 32), (4, 32)])):
        with fast_matmul(net, library=library), torch.no_grad():
            net[0](x.bfloat16())
            net[1](y)
        assert asked == expected
        asked.clear()
    with fast_matmul(net, library="fp32"):
        linear(x.bfloat16(), net[0].weight, net[0].bias)
        linear(x, net[1].weight.bfloat16().float())
        assert asked == [(3, 32), (3, 32)]
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which asks for bf16
            net[0](x)
        assert len(asked) == 2


@pytest.mark.parametrize(
    ("instructions", "gains", "chosen"),
    [(True, (2.0, 4.0), "bf16"), (True, (2.0, 2.1), "fp32"), (True, (0.9, 1.2), "bf16"), (False, (1.0, 9.0), "fp32")],
)
def test_of_a_bf16_model_instructions_and_a_gain_over_the_best_of_fp32_decide(monkeypatch, instructions, gains, chosen):
    monkeypatch.delenv("HFPATCH_MATMUL", raising=False)
    monkeypatch.setattr(cpu, "has_onednn", lambda: True)
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: instructions)
    monkeypatch.setattr(cpu, "measured_gain", lambda *given: gains[given[3:] == (torch.bfloat16,)])
    assert choose_library(nn.Linear(512, 512).bfloat16()) == chosen
    assert choose_library(nn.Linear(8, 8).bfloat16()) == ("bf16" if instructions else "fp32")  # too small to measure
    assert choose_library(nn.Linear(512, 512)) in ("mkl", "onednn")
    monkeypatch.setenv("HFPATCH_MATMUL", "fp32" if chosen == "bf16" else "bf16")
    assert choose_library(nn.Linear(512, 512).bfloat16()) != chosen
    assert choose_library(nn.Linear(8, 8)) == "mkl"  # the variable is of bf16 models
    with pinned_library("mkl"):  # a run that was begun before there was a choice
        assert choose_library(nn.Linear(8, 8).bfloat16()) == "mkl"
    with pytest.raises(HfpatchError, match="but the run was begun with"), pinned_library(chosen):
        pass


def test_the_variable_decides_by_hand(monkeypatch):
    monkeypatch.setenv("HFPATCH_MATMUL", "mkl")
    assert choose_library(nn.Linear(4, 4)) == "mkl"
    monkeypatch.setenv("HFPATCH_MATMUL", "fastest")
    with pytest.raises(HfpatchError, match=r"^HFPATCH_MATMUL is 'fastest'; give mkl or onednn, for a model in"):
        choose_library(nn.Linear(4, 4))
    monkeypatch.setenv("HFPATCH_MATMUL", "onednn")
    monkeypatch.setattr(cpu, "has_onednn", lambda: False)
    with pytest.raises(HfpatchError, match="does not have"):
        choose_library(nn.Linear(4, 4))
