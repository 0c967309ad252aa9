import pytest
import torch

from hfpatch.errors import HfpatchError
from hfpatch.nn import ContentSkip

D = 12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_value(dtype, tolerance):
    module = ContentSkip(hidden_size=D).to(dtype)
    module.skip.weight.data = torch.randn(D, D, dtype=dtype)
    branch, x = torch.randn(2, 2, 5, D, dtype=dtype)
    torch.testing.assert_close(
        module(branch, x), branch + x @ module.skip.weight.T, rtol=tolerance, atol=10 * tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_identity_init_is_a_no_op_bit_for_bit(dtype):
    branch, x = torch.randn(2, 2, 5, D).to(dtype)
    changed = ContentSkip(hidden_size=D)(branch, x)
    assert torch.equal(changed, branch)
    assert changed.dtype == dtype


def test_init_statistics_seed_and_shape():
    weight = ContentSkip(hidden_size=300, init="paper").skip.weight
    assert weight.std().item() == pytest.approx(1e-4, rel=0.02)
    assert abs(weight.mean()) < 2e-6
    first, again, other = (ContentSkip(hidden_size=D, init="paper", seed=s).skip.weight for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert [(name, tuple(p.shape)) for name, p in ContentSkip(hidden_size=D).named_parameters()] == [
        ("skip.weight", (D, D))
    ]
    with pytest.raises(HfpatchError, match="init='none' is not one of identity"):
        ContentSkip(hidden_size=D, init="none")


def test_low_precision_is_computed_in_fp32_and_rounded_once():
    module = ContentSkip(hidden_size=D)
    module.skip.weight.data = torch.randn(D, D)
    branch, x = torch.randn(2, 2, 5, D).to(torch.bfloat16)
    expected = branch.float() + x.float() @ module.skip.weight.T
    assert torch.equal(module(branch, x), expected.to(torch.bfloat16))
