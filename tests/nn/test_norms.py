import pytest
import torch

from hfpatch.errors import HfpatchError
from hfpatch.nn import make_norm

SIZE = 6


def rms_norm(x, gain):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) * gain


def layer_norm(x, gain):
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return centred / torch.sqrt((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) * gain


@pytest.mark.parametrize(("name", "formula"), [("rmsnorm", rms_norm), ("layernorm", layer_norm)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("scale", [1.0, 1e-3])  # at 1e-3 the eps of 1e-5 decides the value
def test_value(name, formula, dtype, tolerance, scale):
    norm = make_norm(name, SIZE).to(dtype)
    gain = torch.linspace(-1, 2, SIZE, dtype=dtype)
    norm.weight.data = gain
    x = (scale * (torch.randn(2, 3, SIZE) + 0.7)).to(dtype)
    torch.testing.assert_close(norm(x), formula(x, gain), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_there_is_a_gain_of_one_and_no_bias(name):
    parameters = dict(make_norm(name, SIZE).named_parameters())
    assert list(parameters) == ["weight"]
    assert torch.equal(parameters["weight"], torch.ones(SIZE))


def test_none_is_the_identity_and_an_unknown_name_is_refused():
    norm = make_norm("none", SIZE)
    x = torch.randn(2, SIZE)
    assert torch.equal(norm(x), x)
    assert not list(norm.parameters())
    with pytest.raises(HfpatchError, match=r"norm 'rms_norm' is not one of .*did you mean 'rmsnorm'"):
        make_norm("rms_norm", SIZE)
