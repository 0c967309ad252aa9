"""Causal attention in blocks, against the formula in fp64."""

import pytest
import torch
from torch import nn

import hfpatch.nn.attention
from hfpatch.nn.attention import bf16_attention, causal_attention
from hfpatch.nn.matmul import fast_matmul


def expected(query, key, value, scale, window=10_000, hidden=None):
    """softmax(scale Q K^T) V with a triangular mask, or a band, or with some keys hidden, written out."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    back = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    beyond = (back < 0) | (back >= window) if hidden is None else hidden
    return (scale * query @ key.transpose(2, 3)).masked_fill(beyond, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("library", ["mkl", "onednn"])
@pytest.mark.parametrize(
    ("heads", "groups", "length", "window"),
    [
        *[(2, 2, 1, None), (2, 1, 127, None), (3, 1, 128, None), (6, 2, 300, None), (10, 2, 70, None)],
        *[(1, 1, 1100, None), (3, 1, 300, 1), (10, 2, 300, 100), (4, 2, 200, 128), (1, 1, 1500, 1101)],
        (2, 1, 130, 131),
    ],
)
def test_it_is_the_formula_and_has_its_gradients(heads, groups, length, window, library):
    torch.manual_seed(0)
    query, key = 4 * torch.randn(2, heads, length, 8), torch.randn(2, groups, length, 8)
    value, outer = torch.randn(2, groups, length, 12), torch.randn(2, heads, length, 12)  # wider than the keys
    given = [tensor.requires_grad_() for tensor in (query, key, value)]
    wanted = expected(*given, 0.3, window or length)
    with fast_matmul(nn.Linear(1, 1), library=library):
        actual = causal_attention(*given, 0.3, window)
        gradients = torch.autograd.grad(actual, given, outer)
        unscaled = causal_attention(*given, window=window)
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unscaled.double(), expected(*given, 8**-0.5, window or length), rtol=1e-5, atol=1e-5)
    for gradient, right in zip(gradients, torch.autograd.grad(wanted, given, outer.double()), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("library", ["bf16", "fp32"])
def test_in_bf16_only_the_result_is_rounded(library):
    torch.manual_seed(0)
    query, key, value = (
        tensor.bfloat16() for tensor in (12 * torch.randn(1, 2, 200, 8), *torch.randn(2, 1, 1, 200, 8))
    )
    given = [tensor.requires_grad_() for tensor in (query, key, value)]
    wanted = expected(*given, 8**-0.5)
    with fast_matmul(nn.Linear(1, 1).bfloat16(), library=library):
        actual = causal_attention(*given)
        gradients = torch.autograd.grad(actual.sum(), given)
    assert actual.dtype == gradients[0].dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), wanted, rtol=2**-8, atol=1e-5)
    for gradient, right in zip(gradients, torch.autograd.grad(wanted.sum(), given), strict=True):
        torch.testing.assert_close(gradient.float(), right.float(), rtol=0.02, atol=0.02 * float(right.abs().max()))


def test_autocast_changes_nothing():
    given = [torch.randn(1, 2, 200, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    results = []
    for enabled in (False, True):
        q, k, v = (tensor.clone().requires_grad_() for tensor in given)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = causal_attention(q, k, v)
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for plain, under_autocast in zip(*results, strict=True):
        assert torch.equal(plain, under_autocast)


@pytest.mark.parametrize("most", [1, 4000, 1 << 19])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "length"),
    [(2, 2, 2, 1), (5, 6, 2, 60), (3, 2, 1, 127), (1, 4, 4, 128), (1, 3, 1, 300)],
)
def test_products_in_bf16_give_the_formula_also_of_large_logits(batch, heads, groups, length, most, monkeypatch):
    """Logits of 100, rounded to bf16, would be wrong by up to 0.25, and weights by a quarter."""
    monkeypatch.setattr(hfpatch.nn.attention, "_LOGITS", most)
    torch.manual_seed(0)
    query = 40 * torch.randn(batch, length, heads, 8).transpose(1, 2)
    key, value = torch.randn(batch, groups, length, 8), torch.randn(batch, groups, length, 12)
    given = [tensor.bfloat16() for tensor in (query, key, value)]
    hidden = (torch.rand(batch, 1, length, length) < 0.5) | torch.ones(length, length, dtype=torch.bool).triu()
    hidden &= ~torch.eye(length, dtype=torch.bool)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    bounds = {"rtol": 2**-7, "atol": 2**-6}
    with torch.no_grad():
        actual, masked = bf16_attention(*given, 0.3), bf16_attention(*given, 0.3, mask)
        unscaled = bf16_attention(*given)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected(*given, 0.3), **bounds)
    torch.testing.assert_close(masked.double(), expected(*given, 0.3, hidden=hidden), **bounds)
    torch.testing.assert_close(unscaled.double(), expected(*given, 8**-0.5), **bounds)


def test_far_logits_stay_finite():
    """Tiles of 1,024 keys whose logits are 200 apart: e^200 is beyond fp32."""
    length = 1100
    key = torch.zeros(1, 1, length, 4)
    key[..., 0] = torch.where(torch.arange(length) < 1024, -100.0, 100.0)
    query, value = torch.zeros(1, 1, length, 4), torch.randn(1, 1, length, 4)
    query[..., 0] = 1.0
    for sign in (1.0, -1.0):
        actual = causal_attention(sign * query, key, value, 1.0)
        torch.testing.assert_close(actual.double(), expected(sign * query, key, value, 1.0), rtol=1e-5, atol=1e-5)
