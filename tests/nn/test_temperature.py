import pytest
import torch

from hfpatch.nn import QueryTemperature, scale_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_is_an_exact_no_op_in_the_queries_dtype(dtype):
    query = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    query[0, 0, 0] = -0.0
    module = QueryTemperature(heads=3)
    assert sum(p.numel() for p in module.parameters()) == 3
    for shape, axis in (((2, 5, 12), -1), ((2, 5, 3, 4), 2), ((2, 3, 5, 4), 1)):
        shaped = query.reshape(shape)
        out = module(shaped, axis)
        assert out.dtype == dtype
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32  # so that -0.0 is not 0.0
        assert torch.equal(out.view(bits), shaped.view(bits))


def test_each_head_is_multiplied_wherever_its_axis_is():
    query, tau = torch.arange(1.0, 25.0).reshape(1, 2, 12), torch.tensor([0.5, -1.0, 2.0])
    expected = query.reshape(1, 2, 3, 4) * torch.tensor([1.5, 0.0, 3.0])[None, None, :, None]
    assert torch.equal(scale_heads(query, tau), expected.reshape(1, 2, 12))
    assert torch.equal(scale_heads(query.reshape(1, 2, 3, 4), tau, 2), expected)
    assert torch.equal(scale_heads(query.reshape(1, 2, 3, 4).transpose(1, 2), tau, 1), expected.transpose(1, 2))
    assert scale_heads(query[:0], tau).shape == (0, 2, 12)
