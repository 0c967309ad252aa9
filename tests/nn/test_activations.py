import math

import pytest
import torch

from hfpatch.errors import HfpatchError
from hfpatch.nn import ACTIVATIONS, activation

X = torch.tensor([-3.0, -0.5, 0.0, 0.25, 2.0], dtype=torch.float64)

FORMULAS = {
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
    "identity": lambda x: x,
}


def test_every_activation_has_a_formula_here():
    assert set(FORMULAS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", FORMULAS)
def test_value(name):
    expected = torch.tensor([FORMULAS[name](x) for x in X.tolist()], dtype=torch.float64)
    torch.testing.assert_close(activation(name)(X), expected, rtol=1e-14, atol=1e-15)


def test_gelu_is_the_exact_one_not_the_tanh_approximation():
    x = torch.tensor([1.5], dtype=torch.float64)
    approximation = torch.nn.functional.gelu(x, approximate="tanh")
    assert abs(float(activation("gelu")(x) - approximation)) > 1e-5


@pytest.mark.parametrize(("name", "meant"), [("gelo", "gelu"), ("relu_2", "relu2"), ("silo", "silu")])
def test_an_unknown_name_is_refused_with_the_nearest(name, meant):
    with pytest.raises(HfpatchError, match=rf"activation='{name}'.*did you mean '{meant}'"):
        activation(name)


def test_a_name_far_from_all_is_refused_without_a_guess():
    with pytest.raises(HfpatchError, match=r"activation='wxyz' is not one of gelu, relu, relu2, silu, identity$"):
        activation("wxyz")
