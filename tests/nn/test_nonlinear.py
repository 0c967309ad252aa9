import itertools

import pytest
import torch
from reference import ACTIVATIONS, NORMS

from hfpatch.errors import HfpatchError
from hfpatch.nn import IdentityAnchoredQuery, NonlinearProjection

D, OUT = 16, 24
COMBINATIONS = [*itertools.product(["gelu"], NORMS, NORMS), *((a, "rmsnorm", "layernorm") for a in ACTIVATIONS)]


def made(*, dtype=torch.float32, **options):
    module = NonlinearProjection(**{"hidden_size": D, "out_features": OUT, **options}).to(dtype)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=dtype) * 0.5
    return module


@pytest.mark.parametrize(("activation", "norm_in", "norm_out"), COMBINATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_value(activation, norm_in, norm_out, dtype, tolerance):
    """f(x) = LN(g(RMSNorm(x) W_1) W_2), each norm on, off or swapped."""
    module = made(dtype=dtype, activation_name=activation, input_norm=norm_in, output_norm=norm_out)
    x = torch.randn(2, 5, D, dtype=dtype) * 2 + 0.5
    gain_in, gain_out = (getattr(norm, "weight", None) for norm in (module.norm_in, module.norm_out))
    inner = ACTIVATIONS[activation](NORMS[norm_in](x, gain_in) @ module.up.weight.T)
    expected = NORMS[norm_out](inner @ module.down.weight.T, gain_out)
    torch.testing.assert_close(module(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [1.0, 1e-3])  # at 1e-3 the eps of 1e-5 decides the value
def test_a_product_that_is_joined_with_others_gives_the_same(scale):
    module, x = made(dtype=torch.float64), scale * torch.randn(2, 5, D, dtype=torch.float64)
    product = x @ (module.norm_in.weight * module.up.weight).T
    torch.testing.assert_close(module.from_joined(x, product), module(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("output_norm", NORMS)
def test_silent_init_is_zero_bit_for_bit_and_leaves_a_gradient_for_the_first_step(output_norm):
    module = NonlinearProjection(hidden_size=D, out_features=OUT, output_norm=output_norm, silent=True)
    f = module(torch.randn(2, 5, D))
    assert torch.equal(f, torch.zeros(2, 5, OUT))
    (f * torch.randn(f.shape)).sum().backward()
    last = module.down.weight if output_norm == "none" else module.norm_out.weight
    assert last.grad.abs().min() > 0


@pytest.mark.parametrize("output_norm", NORMS)
def test_loud_init_is_of_unit_scale_at_any_width(output_norm):
    for d in (64, 512):
        module = NonlinearProjection(hidden_size=d, out_features=d, output_norm=output_norm, activation_name="identity")
        assert module(7 * torch.randn(64, d)).std().item() == pytest.approx(1, rel=0.1)


def test_init_statistics_and_names():
    module = NonlinearProjection(hidden_size=400, out_features=300, rank=100)
    assert module.up.weight.std().item() == pytest.approx(400**-0.5, rel=0.02)
    assert module.down.weight.std().item() == pytest.approx(100**-0.5, rel=0.02)
    linear = IdentityAnchoredQuery(hidden_size=400, out_features=400, f="linear")
    assert linear.f.weight.std().item() == pytest.approx(400**-0.5, rel=0.02)
    assert torch.equal(module.norm_in.weight, torch.ones(400))
    assert torch.equal(module.norm_out.weight, torch.ones(300))
    first = NonlinearProjection(hidden_size=D, out_features=D, rank=D, seed=1)
    assert not torch.equal(first.up.weight, first.down.weight)
    names = [name for name, _ in NonlinearProjection(hidden_size=D, out_features=OUT).named_parameters()]
    assert names == ["norm_in.weight", "up.weight", "down.weight", "norm_out.weight"]


def test_low_precision_input_is_computed_in_the_dtype_of_the_weights():
    module = made()
    x = torch.randn(2, 5, D).to(torch.bfloat16)
    assert module(x).dtype == torch.float32
    assert torch.equal(module(x), module(x.float()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"rank": -3}, "rank=-3 must be at least 1"),
        ({"rank": 10**12}, "rank=1000000000000 must be at most 1024 times the hidden size"),
        ({"hidden_size": 15}, "hidden size 15 is odd, so the rank"),
        ({"activation_name": "gleu"}, "did you mean 'gelu'"),
        ({"input_norm": "rms"}, "did you mean 'rmsnorm'"),
        ({"output_norm": "layer_norm"}, "did you mean 'layernorm'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(HfpatchError, match=message):
        NonlinearProjection(**{"hidden_size": D, "out_features": OUT, **options})
    assert NonlinearProjection(hidden_size=15, out_features=15, rank=7)(torch.randn(1, 15)).shape == (1, 15)
