import pytest
import torch

from hfpatch.nn.softmax import RunningSoftmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 40])
def test_slices_give_the_softmax_of_the_whole(width, dtype):
    logits = torch.randn(5, 40) * 20
    logits[0] -= 1e4  # a row far below zero
    softmax, weighted = RunningSoftmax(5, logits.device, dtype), torch.zeros(5, dtype=dtype)
    values = torch.randn(40)
    for start in range(0, 40, width):
        part = logits[:, start : start + width].clone()
        shares, shrink = softmax.add(part, part.amax(1))
        weighted = weighted * shrink + (shares * values[start : start + width]).sum(1, dtype=dtype)
    expected = logits.double().logsumexp(1).to(dtype)
    torch.testing.assert_close(softmax.logsumexp, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(softmax.top, logits.amax(1))
    expectation = (logits.double().softmax(1) * values).sum(1).to(dtype)
    torch.testing.assert_close(weighted / softmax.total, expectation, rtol=1e-4, atol=1e-5)
