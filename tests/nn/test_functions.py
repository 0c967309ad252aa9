import pytest
import torch
from reference import ACTIVATIONS as FORMULAS
from reference import layer_norm, rms_norm

from hfpatch.errors import HfpatchError
from hfpatch.nn import ACTIVATIONS, activation, make_norm

X = torch.tensor([-3.0, -0.5, 0.0, 0.25, 2.0], dtype=torch.float64)
SIZE = 6


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    torch.testing.assert_close(activation(name)(X), FORMULAS[name](X), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (activation, "gelo", "activation='gelo'.*did you mean 'gelu'"),
        (activation, "relu_2", "activation='relu_2'.*did you mean 'relu2'"),
        (activation, "silo", "activation='silo'.*did you mean 'silu'"),
        (activation, "wxyz", "activation='wxyz' is not one of gelu, relu, relu2, silu, identity$"),
        (lambda name: make_norm(name, SIZE), "rms_norm", "norm 'rms_norm' is not one of .*did you mean 'rmsnorm'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(make, name, message):
    with pytest.raises(HfpatchError, match=message):
        make(name)


@pytest.mark.parametrize(("name", "formula"), [("rmsnorm", rms_norm), ("layernorm", layer_norm)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("scale", [1.0, 1e-3])  # at 1e-3 the eps of 1e-5 decides the value
def test_norm(name, formula, dtype, tolerance, scale):
    norm = make_norm(name, SIZE).to(dtype)
    gain = torch.linspace(-1, 2, SIZE, dtype=dtype)
    norm.weight.data = gain
    x = (scale * (torch.randn(2, 3, SIZE) + 0.7)).to(dtype)
    torch.testing.assert_close(norm(x), formula(x, gain), rtol=tolerance, atol=tolerance)


def test_norms_have_a_gain_of_one_and_no_bias_and_none_is_the_identity():
    for name in ("rmsnorm", "layernorm"):
        ((key, gain),) = make_norm(name, SIZE).named_parameters()
        assert key == "weight"
        assert torch.equal(gain, torch.ones(SIZE))
    norm = make_norm("none", SIZE)
    x = torch.randn(2, SIZE)
    assert torch.equal(norm(x), x)
    assert not list(norm.parameters())
