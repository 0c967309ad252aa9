import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from hfpatch.sites.lm_head import Tail
from hfpatch.training.loss import ChunkedLoss, chunk_rows, loss_from_hidden, loss_from_logits

IGNORED = -100


def reference(logits, labels):
    """The sum over predicted tokens of -log softmax, written out."""
    total = torch.zeros((), dtype=torch.float64)
    for row, wanted in zip(logits.double(), labels.tolist(), strict=True):
        for index in range(len(wanted) - 1):
            if wanted[index + 1] != IGNORED:
                scores = row[index]
                total = total + torch.log(torch.exp(scores - scores.max()).sum()) + scores.max()
                total = total - scores[wanted[index + 1]]
    return total


def case(*, bias=True, batch=3, seq=7, hidden=5, vocabulary=11, seed=0, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(batch, seq, hidden, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, generator=generator, requires_grad=True)
    offset = torch.randn(vocabulary, generator=generator, requires_grad=True) if bias else None
    labels = torch.randint(vocabulary, (batch, seq), generator=generator)
    labels[torch.rand(batch, seq, generator=generator) < ignored] = IGNORED
    return states, weight, offset, labels


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None], allow_unused=True)


def logits_of(states, weight, offset, tail):
    z = torch.einsum("bsh,vh->bsv", states, weight) + (0 if offset is None else offset)
    z = tail.scale * z
    return z if tail.cap is None else tail.cap * torch.tanh(z / tail.cap)


@pytest.mark.parametrize("tail", [Tail(), Tail(scale=0.25), Tail(cap=2.0), Tail(scale=3.0, cap=1.5)])
@settings(max_examples=20, deadline=None)
@given(
    tile=st.tuples(st.integers(1, 9), st.integers(1, 12)), batch=st.integers(1, 4), seq=st.integers(2, 9),
    seed=st.integers(0, 10**6), ignored=st.sampled_from([0.0, 0.5, 0.9]), bias=st.booleans(), frozen=st.booleans(),
)  # fmt: skip
def test_both_losses_are_sums_over_predicted_tokens_and_gradients_those_of_full_logits(tail, tile, frozen, **shape):
    """With any chunk and any tile, of any shape."""
    *tensors, labels = case(**shape)
    for part in tensors[1:]:
        if part is not None:
            part.requires_grad_(not frozen)
    logits = logits_of(*tensors, tail)
    expected = reference(logits, labels)
    trained = tensors[:1] if frozen or expected == 0 else tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hfpatch.training.loss.chunk_rows", lambda vocabulary, device: tile[0])
        patch.setattr("hfpatch.training.loss._TILE", tile)
        summed = loss_from_hidden(*tensors, labels, tail=tail)
        actual = gradients(2 * summed, *trained)
    for loss in (summed, loss_from_logits(logits, labels)):
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    if expected != 0:
        torch.testing.assert_close(actual, gradients(2 * expected, *trained), rtol=1e-4, atol=1e-5)


def test_nothing_to_predict_is_a_loss_of_zero_with_a_gradient_of_zero():
    states, weight, offset, labels = case()
    loss = loss_from_hidden(states, weight, offset, torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss == 0
    assert states.grad.abs().sum() == 0


def test_autocast_computes_in_bf16_what_the_stock_path_would():
    states, weight, offset, labels = case(hidden=32, vocabulary=64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = loss_from_logits(functional.linear(states, weight, offset), labels)
        fused = loss_from_hidden(states, weight, offset, labels)
    exact = reference(logits_of(states, weight, offset, Tail()), labels)
    assert fused.dtype == torch.float32
    torch.testing.assert_close(fused, stock, rtol=1e-5, atol=0)
    assert fused != exact.float()


def test_a_bf16_head_gives_a_sum_in_float32():
    states, weight, offset, labels = (
        value.detach().bfloat16() if value.is_floating_point() else value for value in case(hidden=32, vocabulary=64)
    )
    stock = loss_from_logits(functional.linear(states, weight, offset), labels)
    fused = loss_from_hidden(states.requires_grad_(), weight, offset, labels)
    torch.testing.assert_close(fused, stock, rtol=1e-5, atol=0)
    assert fused != fused.bfloat16().float()
    fused.backward()
    assert states.grad.dtype == torch.bfloat16
    exact = states.detach().float().requires_grad_()
    loss_from_logits(functional.linear(exact, weight.float(), offset.float()), labels).backward()
    assert (states.grad.float() - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_a_trained_bf16_head_has_the_gradient_of_all_chunks_rounded_once(monkeypatch):
    """Not the sum of rounded sums; the factor of the loss, a third here, is no power of two either."""
    monkeypatch.setattr("hfpatch.training.loss.chunk_rows", lambda vocabulary, device: 4)
    given = case(batch=8, seq=64, vocabulary=16, ignored=0.0)
    tensors = [value.detach().bfloat16().requires_grad_() for value in given[:3]]
    wide = [value.detach().double().requires_grad_() for value in tensors]
    expected = gradients(reference(logits_of(*wide, Tail()), given[3]) / 3, *wide)
    for made, exact in zip(gradients(loss_from_hidden(*tensors, given[3]) / 3, *tensors), expected, strict=True):
        assert made.dtype == torch.bfloat16
        assert (made - exact).norm() < 2**-8 * exact.norm()


def test_a_chunk_allocates_its_logits_once_and_a_frozen_head_a_tile():
    """Its gradient takes the same memory; a second buffer would cost as much time as the softmax."""
    assert sum(allocations(torch.randn(4096, 8, requires_grad=True))) < 1.5 * 64 * 4096 * 4
    assert max(allocations(torch.randn(8192, 8))) == 64 * 2048 * 4


def allocations(weight):
    """The bytes of each buffer that the loss of 64 rows takes."""
    rows, targets = torch.randn(64, 8, requires_grad=True), torch.randint(4096, (64,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ChunkedLoss.apply(rows, weight, None, targets, None, 64)
    taken = [event.self_cpu_memory_usage for event in profile.events()]
    return [bytes_ for bytes_ in taken if bytes_ > 0]


@pytest.mark.parametrize("frozen", [True, False])
def test_logits_far_apart_lose_nothing(frozen, monkeypatch):
    """A target whose share underflows has a finite loss, and its gradient is exact."""
    monkeypatch.setattr("hfpatch.training.loss._TILE", (1, 1))
    rows = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[300.0], [0.0], [-300.0]], requires_grad=not frozen)
    loss = ChunkedLoss.apply(rows, weight, None, torch.tensor([2]), None, 64)
    loss.backward()
    assert (loss.item(), rows.grad.item()) == (600.0, 600.0)


def test_no_chunk_holds_full_logits(monkeypatch):
    chunks = []
    original = ChunkedLoss.apply
    monkeypatch.setattr(ChunkedLoss, "apply", lambda *values: (chunks.append(values[-1]), original(*values))[1])
    states, weight, offset, labels = case(vocabulary=50_000, batch=1, seq=5)
    loss_from_hidden(states, weight, offset, labels)
    assert chunks == [chunk_rows(50_000, torch.device("cpu"))] == [128]


def test_liger_gets_its_arguments_where_it_is_installed(monkeypatch):
    calls = []

    def fused(rows, weight, targets, *, bias, reduction, softcap):
        calls.append((tuple(rows.shape), reduction, softcap))
        return functional.cross_entropy(rows @ weight.T, targets, reduction=reduction)

    module = ModuleType("liger_kernel.transformers.functional")
    module.liger_fused_linear_cross_entropy = fused
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", module)
    from hfpatch.training import loss

    assert loss._liger() is fused
    states, weight, _, labels = case(bias=False)
    kept = int((labels[:, 1:] != IGNORED).sum())
    loss_from_hidden(states, weight, None, labels, tail=Tail(cap=3.0))
    assert calls == []  # not on a CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    loss_from_hidden(states, weight, None, labels, tail=Tail(cap=3.0))
    assert calls == [((kept, 5), "sum", 3.0)]


@pytest.mark.parametrize("tail", [Tail(), Tail(scale=3.0, cap=1.5)])
@pytest.mark.parametrize("tiles", [(4, 3), (512, 2048)])
def test_the_loss_by_token_is_that_of_each_position(tail, tiles, monkeypatch):
    monkeypatch.setattr("hfpatch.training.loss._TILE", tiles)
    states, weight, offset, labels = case(batch=4)
    logits = logits_of(states, weight, offset, tail).detach()
    expected = torch.zeros(labels.shape, dtype=torch.float64)
    for row, index in (labels[:, 1:] != IGNORED).nonzero().tolist():
        expected[row, index] = -torch.log_softmax(logits[row, index].double(), -1)[labels[row, index + 1]]
    for losses in (
        loss_from_hidden(states, weight, offset, labels, tail=tail, by_token=True),
        loss_from_logits(logits, labels, by_token=True),
    ):
        torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
        assert not losses.requires_grad
    nothing = torch.full_like(labels, IGNORED)
    assert loss_from_hidden(states, weight, offset, nothing, tail=tail, by_token=True).count_nonzero() == 0
