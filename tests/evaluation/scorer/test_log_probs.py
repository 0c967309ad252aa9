import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hfpatch.evaluation.scorer.head import BodyAndHead, WholeModel
from hfpatch.evaluation.scorer.log_probs import from_logits, log_probabilities
from hfpatch.sites.lm_head import Tail

VOCABULARY, WIDTH = 700, 6


def make_head(bias, dtype=torch.float32):
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    with torch.no_grad():
        head.weight[300:600] = head.weight[:300]  # logits that are equal, in other slices and in the same one
        head.weight[10] = head.weight[9]
        if bias:
            head.bias[300:600] = head.bias[:300]
    return head.to(dtype)


@torch.no_grad()
def reference(logits, rows, tokens):
    log = logits.float().log_softmax(dim=-1)
    return log[rows, tokens], log.argmax(dim=-1)[rows] == tokens


@torch.no_grad()
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.booleans(), st.sampled_from([(1.0, None), (0.3, None), (1.0, 5.0)]), st.booleans())
def test_slices_give_the_log_softmax_and_its_arg_max(seed, bias, finish, greedy_targets):
    torch.manual_seed(seed)
    scale, cap = finish
    parts = BodyAndHead(nn.Identity(), make_head(bias), Tail(scale, cap))
    features = 4 * torch.randn(5, WIDTH)
    logits = parts.head(features) * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    rows = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4])
    tokens = torch.randint(VOCABULARY, (8,))
    if greedy_targets:  # the first of the equal largest, and a later one that is as large
        tokens[::2] = logits.argmax(dim=-1)[rows][::2]
        tokens[1::2] = (logits.argmax(dim=-1)[rows][1::2] + 300) % VOCABULARY
    targets = (rows, tokens)
    assert parts.sliceable(features)
    values, greedy = log_probabilities(parts, features, *targets, numbers=5 * 256)
    expected, expected_greedy = reference(logits, *targets)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-5)
    # where two logits are equal up to rounding, the order in which a product is summed decides
    others = logits[rows].scatter(1, tokens[:, None], -torch.inf).amax(dim=-1)
    clear = (others - logits[rows, tokens]).abs() > 1e-3
    assert torch.equal(greedy[clear], expected_greedy[clear])


@pytest.mark.parametrize("second", [100, 600])
@torch.no_grad()
def test_of_logits_whose_log_probabilities_round_to_the_same_the_first_is_greedy(second):
    """In one slice of 256 and in two."""
    logits = torch.zeros(1, VOCABULARY)  # the logarithm of the sum of 700 is 6.55, with steps of 5e-7
    logits[0, 5], logits[0, second] = 0.5, torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))
    head = nn.Linear(1, VOCABULARY, bias=False)
    head.weight.copy_(logits.T)
    targets = torch.tensor([0, 0]), torch.tensor([5, second])
    assert reference(logits, *targets)[1].tolist() == [True, False]  # the first, though its logit is smaller
    for greedy in (
        from_logits(logits.clone(), *targets)[1],
        log_probabilities(BodyAndHead(nn.Identity(), head), torch.ones(1, 1), *targets, numbers=256)[1],
    ):
        assert greedy.tolist() == [True, False]


@torch.no_grad()
def test_bf16_features_are_summed_in_fp32():
    torch.manual_seed(1)
    parts = BodyAndHead(nn.Identity(), make_head(True, torch.bfloat16))
    features = torch.randn(6, WIDTH, dtype=torch.bfloat16)
    tokens = torch.cat([parts.head(features[:3]).argmax(dim=-1), torch.tensor([1, 2, 699])])
    targets = (torch.arange(6), tokens)
    values, _ = log_probabilities(parts, features, *targets, numbers=10)
    expected, _ = reference(parts.head(features), *targets)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, rtol=0, atol=0.05)


@torch.no_grad()
@pytest.mark.parametrize("change", ["hook", "dtype", "class"])
def test_a_head_that_is_more_than_a_matrix_is_taken_as_it_is(change):
    torch.manual_seed(2)
    head = make_head(False)
    features = torch.randn(4, WIDTH)
    if change == "hook":
        head.register_forward_hook(lambda _module, _inputs, output: output * 2)
    elif change == "dtype":
        features = features.double()
        head = nn.Sequential(head).append(nn.Identity())
        head.weight = head[0].weight
        head[0].double()
    else:
        head = nn.Sequential(head, nn.Tanh())
        head.weight = head[0].weight
    parts = BodyAndHead(nn.Identity(), head)
    assert not parts.sliceable(features)
    targets = (torch.arange(4), torch.tensor([0, 1, 2, 3]))
    values, greedy = log_probabilities(parts, features, *targets, numbers=100)
    expected, expected_greedy = reference(head(features), *targets)
    torch.testing.assert_close(values, expected)
    assert torch.equal(greedy, expected_greedy)


def test_logits_of_a_whole_model_are_left_as_they_are():
    features = torch.randn(3, 7)
    kept = features.clone()
    log_probabilities(WholeModel(nn.Identity()), features, torch.arange(3), torch.arange(3), numbers=5)
    assert torch.equal(features, kept)
