import pytest
import torch
from families import HIDDEN, logits_of, make_config, make_model, make_tokens
from transformers import AutoConfig

from hfpatch import HfpatchError, PreProjectionConfig, find_sites, patch
from hfpatch.analysis.heads import weight_matrix
from hfpatch.analysis.reparametrisation import WHY_NOT, random_theta, reparametrise
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.twins import twin

CASES = [
    "gpt_neox", "gpt2", "llama", "mistral", "qwen3", "gemma2", "phi3", "gptj", "opt", "bloom", "falcon_new_decoder",
]  # fmt: skip


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


def test_a_query_that_is_not_invertible_is_not_removed():
    model = make_model("llama")
    model.model.layers[0].self_attn.q_proj.weight.data.fill_(1.0)
    first, second = reparametrise(model, make_tokens())
    assert (first.obstacle, first.removed) == (f"W_Q has rank 1 of {HIDDEN}, so it is not invertible", 0)
    assert first.elimination_error is None
    assert first.invariance_error < 1e-11
    assert second.obstacle == ""


def test_a_patched_model_is_refused_and_the_reason_is_told():
    with pytest.raises(HfpatchError, match="unpatch"):
        reparametrise(patch(make_model("llama"), PreProjectionConfig()), make_tokens())
    assert "orthogonal" in WHY_NOT
    assert "residual" in WHY_NOT


def moved_logits(model, theta):
    """Return the logits of the whole model in the basis xΘ, by plain matrix products on its Linears (out, in)."""
    reads, writes = [model.lm_head], []
    for block in model.model.layers:
        a, m = block.self_attn, block.mlp
        reads += [a.q_proj, a.k_proj, a.v_proj, m.gate_proj, m.up_proj]
        writes += [a.o_proj, m.down_proj]
    for module in reads:  # Θ⁻¹W
        module.weight.data = torch.linalg.solve(theta, module.weight.data.T).T.contiguous()
    for module in writes:  # WΘ
        module.weight.data = (module.weight.data.T @ theta).T.contiguous()
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data @ theta
    return logits_of(model, make_tokens())


def double_llama():
    """Return a Llama all in fp64; its own RMSNorm rounds to fp32."""
    model = make_model("llama").double()
    assert not model.config.tie_word_embeddings
    for name, norm in list(model.named_modules()):
        if type(norm).__name__ == "LlamaRMSNorm":
            made = torch.nn.RMSNorm(HIDDEN, eps=norm.variance_epsilon, dtype=torch.float64)
            made.weight.data.copy_(norm.weight.data)
            model.set_submodule(name, made)
    return model


def from_identity(matrix):
    return float((matrix - torch.eye(len(matrix)).double()).norm()) / len(matrix) ** 0.5


def test_without_norms_one_residual_stream_loses_the_query_of_one_layer_alone():
    model = double_llama()
    for block in model.model.layers:
        block.input_layernorm, block.post_attention_layernorm = torch.nn.Identity(), torch.nn.Identity()
    model.model.norm = torch.nn.Identity()
    expected = logits_of(model, make_tokens())
    queries = [block.self_attn.q_proj for block in model.model.layers]
    theta = queries[0].weight.detach().T.clone()
    found = moved_logits(model, theta)
    assert float((found - expected).abs().max()) < 1e-8 * float(expected.abs().max())
    assert from_identity(queries[0].weight.T) < 1e-9
    assert from_identity(queries[1].weight.T) > 0.5  # Θ⁻¹W_Q of the other layer


def test_with_norms_the_same_change_gives_another_model():
    model = double_llama()
    expected = logits_of(model, make_tokens())
    found = moved_logits(model, model.model.layers[0].self_attn.q_proj.weight.detach().T.clone())
    assert float((found - expected).norm()) > 0.1 * float(expected.norm())


def test_with_norms_the_orthogonal_factor_moves_and_what_is_left_is_as_far_from_identity_as_is_said():
    """W_Q = U P: the stream turns by U, exactly, and W_Q becomes P, which is not the identity."""
    model = double_llama()
    for block in model.model.layers:  # RMSNorm's gain, which would not commute, goes into the matrices behind it
        a, m = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (a.q_proj, a.k_proj, a.v_proj)),
            (block.post_attention_layernorm, (m.gate_proj, m.up_proj)),
            (model.model.norm, (model.lm_head,) if block is model.model.layers[-1] else ()),
        ):
            for reader in readers:
                reader.weight.data = reader.weight.data * norm.weight.data
            if readers:
                norm.weight.data.fill_(1.0)
    expected = logits_of(model, make_tokens())
    torch.testing.assert_close(expected, logits_of(double_llama(), make_tokens()), rtol=1e-9, atol=1e-9)
    (said, _) = reparametrise(model, make_tokens())
    query = model.model.layers[0].self_attn.q_proj
    u, values, v = torch.linalg.svd(query.weight.detach().T)
    found = moved_logits(model, u @ v)
    assert float((found - expected).abs().max()) < 1e-9 * float(expected.abs().max())
    left = query.weight.detach().T  # (UV)⁻¹ U S V = Vᵀ S V
    torch.testing.assert_close(left, v.T @ torch.diag(values) @ v, rtol=1e-9, atol=1e-9)
    factor = float(left.trace() / left.pow(2).sum())
    assert from_identity(factor * left) == pytest.approx(said.orthogonal_distance, rel=1e-6)
    assert said.orthogonal_distance > 0.1


def test_through_a_layernorm_the_mean_has_to_stay_too():
    """Orthogonal is enough for an RMSNorm; a LayerNorm takes the mean off first, so 1Θ has to be 1."""
    ones = torch.full((HIDDEN, 1), HIDDEN**-0.5).double()
    basis = torch.linalg.qr(torch.cat([ones, torch.randn(HIDDEN, HIDDEN - 1).double()], dim=1)).Q
    turn = torch.linalg.qr(torch.randn(HIDDEN - 1, HIDDEN - 1).double()).Q
    keeping = basis @ torch.block_diag(torch.eye(1).double(), turn) @ basis.T
    other = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN).double()).Q
    errors = {}
    for name, query in (("keeping", keeping), ("other", other)):
        model = make_model("gpt2").double()
        block = model.transformer.h[0]
        block.ln_1.weight.data.fill_(1.0)
        block.ln_1.bias.data.zero_()
        block.attn.c_attn.weight.data[:, :HIDDEN] = query
        (first, _) = reparametrise(model, make_tokens())
        assert first.orthogonal_distance < 1e-6
        errors[name] = first.norm_error
    assert errors["keeping"] < 1e-10
    assert errors["other"] > 0.05


@pytest.mark.parametrize(
    ("kind", "obstacle"),
    [
        ("deepseek_v3", "the query is projected from a low-rank latent, not from X"),
        ("qwen3_next", "d_q = 96 differs from d = 64, so W_Q is not square"),  # with a gate beside it that reads X
        ("mixtral", ""),
    ],
)
def test_latent_gated_and_expert_models(kind, obstacle):
    """What else reads X takes Θ⁻¹ in as well; experts, which have no fp64, do not run in it."""
    found = reparametrise(twin(AutoConfig.for_model(kind)), make_tokens())
    for each in found:
        assert 0 < each.invariance_error < 1e-12
        assert each.obstacle == obstacle
        assert (each.elimination_error is None) == bool(obstacle)
        assert each.elimination_error is None or each.elimination_error < 1e-11 * each.query_condition


@pytest.mark.parametrize("query", [{"path": "identity"}, {"path": "residual"}, {}, {"anchor": "weight"}])
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_a_model_pretrained_with_another_query_path_says_so(case, query):
    model = build_scratch(make_config(case), ScratchSettings(query=query))
    for each in reparametrise(model, make_tokens()):
        assert each.obstacle == (
            "the query is not X times one matrix: the model was pretrained without W, or with f beside it"
        )
        assert (each.invariance_error, each.elimination_error, each.norm_error, each.removed) == (None, None, None, 0)


def test_a_linear_query_of_a_model_from_scratch_is_removed_like_any():
    model = build_scratch(make_config("gpt2"), ScratchSettings(biases=False))
    for each in reparametrise(model, make_tokens()):
        assert each.invariance_error < 1e-11
        assert each.elimination_error < 1e-11 * each.query_condition


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
