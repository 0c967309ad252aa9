import math

import pytest
import torch
import torch.nn.functional as F
from families import HIDDEN, make_model, make_tokens

from hfpatch import HfpatchError, PreProjectionConfig, find_sites, patch
from hfpatch.analysis.heads import weight_matrix
from hfpatch.analysis.reparametrisation import WHY_NOT, random_theta, reparametrise, without_query

CASES = [
    "gpt_neox",
    "gpt2",
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "phi3",
    "gptj",
    "opt",
    "bloom",
    "falcon_new_decoder",
]


@pytest.mark.parametrize("case", CASES)
def test_the_invariance_holds_on_the_attention_of_every_family(case):
    model = make_model(case)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = reparametrise(model, make_tokens())
    assert [each.layer for each in found] == [0, 1]
    for each in found:
        assert each.theta_condition == pytest.approx(4)
        assert 0 < each.invariance_error < 1e-11
        if case == "gemma2":
            assert each.elimination_error is None
            assert each.obstacle == "d_q = 48 differs from d = 32, so W_Q is not square"
            assert (each.removed, each.query_condition, each.norm_error) == (0, None, None)
        else:
            assert each.elimination_error < 1e-11 * each.query_condition
            assert (each.removed, each.obstacle) == (HIDDEN**2, "")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_what_stands_in_the_way_is_the_norm():
    """Measured against the formula of RMSNorm on the embedding, which is what layer 0's norm sees."""
    model, tokens = make_model("llama"), make_tokens()
    block = model.model.layers[0]
    query = block.self_attn.q_proj.weight.detach().double().T
    gain = block.input_layernorm.weight.detach().double()
    h = model.model.embed_tokens.weight.detach().double()[tokens]

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * gain

    expected = norm(h) @ query
    error = float((norm(h @ query) - expected).norm() / expected.norm())
    (first, _) = reparametrise(model, tokens)
    assert first.norm_error == pytest.approx(error, rel=1e-5)
    assert error > 0.1
    values = torch.linalg.svdvals(query)
    u, _, v = torch.linalg.svd(query)
    factor = float((query * (u @ v)).sum() / query.pow(2).sum())
    assert first.orthogonal_distance == pytest.approx(float((factor * query - u @ v).norm()) / HIDDEN**0.5, rel=1e-6)
    assert first.query_condition == pytest.approx(float(values[0] / values[-1]), rel=1e-6)


def test_an_orthogonal_query_passes_through_an_rmsnorm_without_gain():
    model = make_model("llama")
    block = model.model.layers[0]
    block.input_layernorm.weight.data.fill_(1.0)
    orthogonal = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN).double()).Q
    block.self_attn.q_proj.weight.data = (3 * orthogonal).float()
    (first, second) = reparametrise(model, make_tokens())
    assert first.orthogonal_distance < 1e-3
    assert first.query_condition == pytest.approx(1, abs=1e-5)
    assert first.norm_error == pytest.approx(2 / 3, abs=1e-4)  # norm(3xU) = xU where norm(x)·3U is asked for
    assert second.norm_error > 0.1


def attend(x, weights, heads):
    """Causal attention in plain torch, x (seq, d)."""
    q, k, v = ((x @ weights[name]).view(len(x), heads, -1).movedim(1, 0) for name in ("query", "key", "value"))
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return (F.softmax(logits.masked_fill(~mask, -math.inf), dim=-1) @ v).movedim(0, 1).flatten(1)


def test_a_whole_model_of_one_attention_without_norms_loses_its_query():
    """Embedding, attention, head: the embedding takes Θ in, and the logits stay."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    embedding, head = draw(20, 16), draw(16, 20)
    weights = {name: draw(16, 16) for name in ("query", "key", "value")}
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    expected = attend(embedding[ids], weights, heads=4) @ head
    theta, new = without_query(weights)
    assert torch.equal(new["query"], torch.eye(16).double())
    found = attend((embedding @ theta)[ids], new, heads=4) @ head
    assert float((found - expected).abs().max()) < 1e-10 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("query", "message"), [(torch.ones(4, 6), "d_q = 6 differs from d = 4"), (torch.ones(4, 4), "rank 1 of 4")]
)
def test_queries_that_cannot_be_removed_are_refused(query, message):
    with pytest.raises(HfpatchError, match=message):
        without_query({"query": query, "key": torch.ones(4, 4), "value": torch.ones(4, 4)})


def test_a_patched_model_is_refused_and_the_reason_is_told():
    with pytest.raises(HfpatchError, match="unpatch"):
        reparametrise(patch(make_model("llama"), PreProjectionConfig()), make_tokens())
    assert "orthogonal" in WHY_NOT
    assert "residual" in WHY_NOT


def test_theta_is_invertible_and_well_conditioned():
    values = torch.linalg.svdvals(random_theta(12, seed=5))
    assert (float(values[0]), float(values[-1])) == (pytest.approx(2), pytest.approx(0.5))


def test_the_matrix_of_a_module_that_holds_no_float_weight_is_asked_for():
    class Packed(torch.nn.Module):
        """Holds its weight as int8, as quantised modules do."""

        def __init__(self, linear):
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.weight = (linear.weight.detach() * 64).round().to(torch.int8)
            self.bias = torch.nn.Parameter(linear.bias.detach())

        def forward(self, x):
            return x @ (self.weight.to(x.dtype) / 64).T + self.bias

    packed = Packed(torch.nn.Linear(6, 4))
    assert float((weight_matrix(packed) - packed.weight.double().T / 64).abs().max()) < 1e-6
    assert weight_matrix(find_sites(make_model("gpt2"))[0].projection_module("query")).shape == (HIDDEN, 3 * HIDDEN)
