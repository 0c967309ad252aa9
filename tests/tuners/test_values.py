"""What the patched model computes, against the formulas applied to an unpatched twin, on every family."""

import warnings

import pytest
import torch
from architectures.formulas import twin_of
from families import FAMILIES, FEW, HIDDEN, gradients, logits_of, make_model, make_tokens, perturb
from peft import get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, QueryTemperatureConfig, find_sites, patch


class CountedCopies(TorchDispatchMode):
    """Counts conversions of tensors from one dtype to another."""

    copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.copies += func.overloadpacket is torch.ops.aten._to_copy
        return func(*args, **(kwargs or {}))


LOW = (torch.bfloat16, torch.float16)
TOLERANCE = 1e-10  # fp64, relative and absolute; logits are of the order of 1 to 10
SQUARE = [case for case in FAMILIES if case not in ("gemma", "gemma2")]  # d_q = d; 4 heads of 12 are not 32

PRE_PROJECTION = {
    "plain": {},
    "skip": {"content_skip": True},
    "gated skip": {"gated": True, "content_skip": True},
    "gated": {"gated": True},
    "narrow relu2": {"expansion": 0.5, "activation": "relu2"},
    "one layer": {"layers_to_transform": 1, "content_skip": True},
    "paper init": {"init": "paper", "content_skip": True, "layers_to_transform": [0]},
}
NONLINEAR_QUERY = {
    "preserving": {},
    "literal": {"form": "literal"},
    "all targets": {"form": "literal", "targets": ("query", "key", "value")},
    "key and value preserving": {"targets": ("key", "value"), "activation": "silu"},
    "value": {"targets": ("value",), "rank": 3},
    "linear control": {"activation": "identity", "rank": 5},
    "norms swapped": {"input_norm": "layernorm", "output_norm": "rmsnorm", "activation": "relu"},
    "no norms": {"input_norm": "none", "output_norm": "none", "activation": "relu2"},
    "no input norm": {"input_norm": "none", "form": "literal"},
    "no output norm": {"output_norm": "none"},
    "one layer": {"layers_to_transform": [1]},
    "identity anchor": {"anchor": "identity", "form": "literal"},
}
MANY = dict.fromkeys(["gated skip", "preserving", "all targets"], FAMILIES) | {"identity anchor": SQUARE}


def cases(options):
    return [(case, what) for what in options for case in MANY.get(what, FEW)]


def config_of(cls, options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a nonlinear branch in both query and key")
        return cls(**options)


def injected(case, config, dtype=torch.float32):
    model = make_model(case, dtype)
    model.add_adapter(config, adapter_name="a")
    return model


def check_values(case, *, order=1, **configs):
    """Compare a model that has adapters, by their names in :func:`twin_of`, with its twin."""
    model, tokens = make_model(case), make_tokens()
    for name, config in [*configs.items()][::order]:
        model.add_adapter(config, adapter_name=name)
    model.set_adapter([*configs])
    perturb(model, std=0.3)
    model.double()
    logits = logits_of(model, tokens)
    expected = logits_of(twin_of(model, case, **{name: (name, config) for name, config in configs.items()}), tokens)
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert (logits - logits_of(make_model(case).double(), tokens)).abs().max() > 1e-3, "nothing happened"


@pytest.mark.parametrize(("case", "what"), cases(PRE_PROJECTION))
def test_pre_projection(case, what):
    check_values(case, pre_projection=PreProjectionConfig(**PRE_PROJECTION[what]))


@pytest.mark.parametrize(("case", "what"), cases(NONLINEAR_QUERY))
def test_nonlinear_query(case, what):
    check_values(case, nonlinear_query=config_of(NonlinearQueryConfig, NONLINEAR_QUERY[what]))


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("order", [1, -1])
def test_both_methods_together_in_either_order(case, order):
    pre, query = PreProjectionConfig(gated=True, content_skip=True), NonlinearQueryConfig(form="literal")
    check_values(case, order=order, pre_projection=pre, nonlinear_query=query)


NO_OPS = [
    PreProjectionConfig,
    lambda: PreProjectionConfig(gated=True, content_skip=True),
    NonlinearQueryConfig,
    QueryTemperatureConfig,
    lambda: config_of(NonlinearQueryConfig, {"targets": ("query", "key", "value"), "output_norm": "none"}),
]


def bits(model, tokens):
    logits = logits_of(model, tokens)
    return logits.view({4: torch.int32, 2: torch.int16}[logits.element_size()])


@pytest.mark.parametrize("make", NO_OPS)
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in FAMILIES), *((case, low) for case in FEW for low in LOW)]
)
def test_default_init_is_a_no_op_bit_for_bit(case, dtype, make):
    tokens = make_tokens()
    expected = bits(make_model(case, dtype), tokens)
    model = get_peft_model(make_model(case, dtype), make())
    assert torch.equal(bits(model, tokens), expected)
    assert torch.equal(bits(injected(case, make(), dtype), tokens), expected)
    perturb(model, std=0.3)
    assert not torch.equal(bits(model, tokens), expected)


@pytest.mark.parametrize("case", FEW)
def test_two_adapters_of_one_method_act_one_after_the_other(case):
    """x -> x~ of the first -> x~ of the second; both skips read the last x~."""
    first, second = PreProjectionConfig(content_skip=True), PreProjectionConfig(gated=True, content_skip=True)
    model = make_model(case)
    model.add_adapter(first, adapter_name="first")
    model.add_adapter(second, adapter_name="second")
    model.set_adapter(["second", "first"])
    perturb(model, std=0.3)
    model.double()
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    layer = find_sites(model)[0].attention.hfpatch_pre_projection
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def w(what, name):
        return weights[f"preproj_{what}.{name}.weight"].T

    def silu(t):
        return t * torch.sigmoid(t)

    once = x + silu(x @ w("up", "first")) @ w("down", "first")
    twice = once + (silu(once @ w("gate", "second")) * (once @ w("up", "second"))) @ w("down", "second")
    torch.testing.assert_close(layer.apply_at("entered", x), twice, rtol=TOLERANCE, atol=TOLERANCE)
    branch = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    expected = branch + twice @ w("skip", "first") + twice @ w("skip", "second")
    torch.testing.assert_close(layer.apply_at("left", branch, twice), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", FAMILIES)
def test_low_precision_base_is_near_the_fp32_one(case):
    """bf16 holds 8 bits: the patched bf16 model strays from the fp32 one about as far as the base itself does."""
    configs = {"a": PreProjectionConfig(content_skip=True), "b": NonlinearQueryConfig()}
    tokens = make_tokens()

    def patched(dtype):
        model = make_model(case, dtype)
        for name, config in configs.items():
            model.add_adapter(config, adapter_name=name)
        model.set_adapter(list(configs))
        perturb(model, std=0.1)
        return logits_of(model, tokens).float()

    exact, low = patched(torch.float32), patched(torch.bfloat16)
    base = (logits_of(make_model(case), tokens) - logits_of(make_model(case, torch.bfloat16), tokens).float()).std()
    assert (exact - low).std() < 4 * base


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_a_step_under_autocast_is_that_of_wide_sums_bit_for_bit_with_fewer_copies(monkeypatch, case, gated):
    """A sum of two bf16 values rounds once, as one in fp32 and its copies do; a gate adds a third gradient."""
    model = patch(make_model(case, torch.bfloat16), PreProjectionConfig(content_skip=True, gated=gated))
    perturb(model)
    grads, copies = [], []
    for wide in (False, True):
        if wide:
            monkeypatch.setattr(PreProjectionConfig, "takes_autocast", lambda self: False)
        with CountedCopies() as counted, torch.autocast("cpu", dtype=torch.bfloat16):
            grads.append(gradients(model, make_tokens(3, 20)))
        copies.append(counted.copies)
    assert all(torch.equal(value, grads[1][name]) for name, value in grads[0].items())
    assert (copies[0] < copies[1]) is not gated
