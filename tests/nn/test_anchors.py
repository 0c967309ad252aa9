import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.errors import HfpatchError
from hfpatch.nn import IdentityAnchoredQuery, anchor_preserving, anchored

D = 16


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 1e-7)])
def test_the_two_forms(dtype, tolerance):
    a, f = torch.randn(2, 2, 5, D, dtype=dtype)
    torch.testing.assert_close(anchored(a, f), (a + f) / 2, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(anchor_preserving(a, f), (2 * a + f) / 2, rtol=tolerance, atol=tolerance)
    assert torch.equal(anchored(a, torch.zeros_like(a)), a / 2)


@given(st.floats(-65504, 65504, width=32))
def test_preserving_with_silent_f_is_the_anchor_bit_for_bit(value):
    a = torch.tensor([value], dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = a.to(dtype)
        assert torch.equal(anchor_preserving(low, torch.zeros(1)), low)


@pytest.mark.parametrize("combine", [anchored, anchor_preserving])
def test_the_result_has_the_dtype_of_the_anchor_and_is_rounded_once(combine):
    a, f = torch.randn(5).to(torch.bfloat16), torch.randn(5)
    assert torch.equal(combine(a, f), combine(a.float(), f).to(torch.bfloat16))


def test_identity_anchor_without_f_and_with_a_linear_one():
    x = torch.randn(2, 5, D)
    module = IdentityAnchoredQuery(hidden_size=D, out_features=D, f="none")
    assert torch.equal(module(x), x)
    assert not list(module.parameters())
    module = IdentityAnchoredQuery(hidden_size=D, out_features=D, f="linear")
    ((name, weight),) = module.named_parameters()
    assert (name, weight.shape) == ("f.weight", (D, D))
    torch.testing.assert_close(module(x), x + x @ weight.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("f", ["none", "linear", "nonlinear"])
def test_another_width_and_an_unknown_f_are_refused(f):
    with pytest.raises(HfpatchError, match="d_q=24 and d=16; use anchor='weight'"):
        IdentityAnchoredQuery(hidden_size=D, out_features=24, f=f)
    with pytest.raises(HfpatchError, match="f='mlp' is not one of none, linear, nonlinear"):
        IdentityAnchoredQuery(hidden_size=D, out_features=D, f="mlp")
