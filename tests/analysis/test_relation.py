"""The Q-K relation against B formed as a d × d matrix, and against the attention weights of whole models."""

from dataclasses import asdict

import pytest
import torch
from families import CASES as CASES_OF_FAMILIES
from families import make_model, make_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hfpatch import HfpatchError, NonlinearQueryConfig, QueryTemperatureConfig, find_sites, patch
from hfpatch.analysis.heads import head_weights, norm_gains
from hfpatch.analysis.relation import Relation, head_relations, in_span, relations
from hfpatch.analysis.rotary import Rotary, rotary_of
from hfpatch.sites.heads import normed
from hfpatch.support.modes import hooked

CASES = ["gpt_neox", "gpt2", "llama"]
HIDDEN, HEADS, K = 32, 4, 8


def direct(b):
    """What a relation says, from B itself, d × d."""
    s, n = (b + b.T) / 2, (b - b.T) / 2
    values = torch.linalg.eigvalsh(s)
    zero = 1e-10 * values.abs().max()
    shares = values.abs()[values.abs() > zero] / values.abs()[values.abs() > zero].sum()
    return {
        "norm": float(torch.linalg.matrix_norm(b)),
        "symmetric": float(s.norm() ** 2 / (s.norm() ** 2 + n.norm() ** 2)),
        "positive": int((values > zero).sum()),
        "negative": int((values < -zero).sum()),
        "positive_energy": float(values[values > 0].pow(2).sum() / values.pow(2).sum()),
        "effective_rank": float(torch.exp(-(shares * shares.log()).sum())),
    }


def same(relation, expected, tolerance=1e-10):
    expected = asdict(expected) if isinstance(expected, Relation) else expected
    assert asdict(relation) == pytest.approx(expected, rel=tolerance, abs=tolerance)


def matrices_of(case, model, layer=0):
    """W_Q and W_K of one layer by head, cut out of the weights by hand: (heads, d, k) each, keys shared as they are."""
    if case == "gpt_neox":  # rows are, per head, q, k, v
        fused = model.gpt_neox.layers[layer].attention.query_key_value.weight.detach().double()
        parts = fused.view(HEADS, 3, K, HIDDEN)
        return parts[:, 0].mT, parts[:, 1].mT
    if case == "gpt2":  # a Conv1D holds (in, out): columns q, k, v
        fused = model.transformer.h[layer].attn.c_attn.weight.detach().double()
        cut = [fused[:, part * HIDDEN : (part + 1) * HIDDEN].view(HIDDEN, HEADS, K).movedim(1, 0) for part in (0, 1)]
        return cut[0], cut[1]
    attention = model.model.layers[layer].self_attn  # two key heads, each for two query heads
    query = attention.q_proj.weight.detach().double().view(HEADS, K, HIDDEN).mT
    key = attention.k_proj.weight.detach().double().view(2, K, HIDDEN).mT
    return query, key[[0, 0, 1, 1]]


def rotation(case, offset):
    """R(Δ), written out from the published formula with the base of the config, the first columns turning."""
    turning = {"gpt_neox": 2, "llama": K, "gpt2": 0}[case]  # Pythia turns a quarter of the columns
    matrix = torch.eye(K, dtype=torch.float64)
    for pair in range(turning // 2):
        angle = torch.tensor(offset * 10000.0 ** (-2 * pair / turning), dtype=torch.float64)
        a, b = pair, pair + turning // 2
        matrix[a, a] = matrix[b, b] = angle.cos()
        matrix[a, b], matrix[b, a] = angle.sin(), -angle.sin()
    return matrix


@pytest.mark.parametrize("case", CASES)
def test_relations_are_those_of_the_whole_matrix(case):
    model = make_model(case)
    weights = head_weights(model)
    heads = head_relations(model, weights, offsets=(0, 1, 5))
    assert [(one.layer, one.head) for one in heads] == [(layer, head) for layer in range(2) for head in range(HEADS)]
    for layer in range(2):
        query, key = matrices_of(case, model, layer)
        for head in range(HEADS):
            one = heads[layer * HEADS + head]
            assert sorted(one.by_offset) == ([0] if case == "gpt2" else [0, 1, 5])
            for offset, relation in one.by_offset.items():
                b = query[head] @ rotation(case, offset) @ key[head].T
                same(relation, direct(b), 1e-6 if offset else 1e-10)  # the model holds its frequencies in fp32
    assert [one.key_head for one in heads[:HEADS]] == ([0, 0, 1, 1] if case == "llama" else [0, 1, 2, 3])


@given(
    hidden=st.integers(2, 12), size=st.integers(1, 8), dependent=st.booleans(), seed=st.integers(0, 10_000)
)  # heads wider than half the hidden state, and keys that are the queries, included
@settings(max_examples=40, deadline=None)
def test_any_shape_agrees_with_the_whole_matrix(hidden, size, dependent, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, hidden, size, generator=generator, dtype=torch.float64)
    key = query if dependent else torch.randn(1, hidden, size, generator=generator, dtype=torch.float64)
    same(relations(*in_span(query, key))[0], direct(query[0] @ key[0].T))
    turn = torch.randn(size, size, generator=generator, dtype=torch.float64)
    same(relations(*in_span(query, key), turn)[0], direct(query[0] @ turn @ key[0].T))


def test_eigenvalues_of_a_head_of_full_rank_and_of_none():
    query, key = torch.randn(2, 1, 64, 8, dtype=torch.float64)
    (relation,) = relations(*in_span(query, key))
    assert (relation.positive, relation.negative) == (8, 8)
    (alike,) = relations(*in_span(query, query))
    assert (alike.symmetric, alike.positive_energy) == (pytest.approx(1), pytest.approx(1))
    assert (alike.positive, alike.negative) == (8, 0)
    (relation,) = relations(*in_span(*torch.zeros(2, 1, 6, 2)))
    assert (relation.norm, relation.positive, relation.negative, relation.effective_rank) == (0, 0, 0, 0)


def change_gauge(query, key, gauge):
    """(W_Q A, W_K A⁻ᵀ): other matrices, the same relation."""
    return query @ gauge, key @ torch.linalg.inv(gauge).mT


def random_gauge(size, rotary=None, seed=0):
    """A random A that does not change the relation at any offset; its condition number is below about 10.

    Without RoPE that is any invertible matrix; with it, in each turning pair a rotation and a factor, and any
    invertible matrix among the columns that do not turn.
    """
    generator = torch.Generator().manual_seed(seed)
    free = torch.ones(size, dtype=torch.bool)
    gauge = torch.zeros(size, size, dtype=torch.float64)
    if rotary is not None:
        free[rotary.first] = free[rotary.second] = False
        angle, factor = (torch.rand(len(rotary.angles), generator=generator, dtype=torch.float64) for _ in range(2))
        a, b = ((0.5 + factor) * turned for turned in ((6.2832 * angle).cos(), (6.2832 * angle).sin()))
        gauge[rotary.first, rotary.first] = gauge[rotary.second, rotary.second] = a
        gauge[rotary.first, rotary.second], gauge[rotary.second, rotary.first] = b, -b
    count = int(free.sum())
    if count:
        drawn = (torch.randn(count, count, generator=generator, dtype=torch.float64) for _ in range(2))
        u, v = (torch.linalg.qr(matrix).Q for matrix in drawn)  # orthogonal
        stretched = torch.rand(count, generator=generator, dtype=torch.float64) * 2.5 + 0.5
        gauge[free.nonzero(), free.nonzero().T] = u * stretched @ v
    return gauge


def test_with_rope_not_every_basis_change_is_a_gauge():
    model = make_model("llama")
    weights = head_weights(model)[0]
    rotary = rotary_of(model, find_sites(model)[0])
    moved = change_gauge(weights.query, weights.key_by_query_head, random_gauge(K, None))
    pairs = ((weights.query, weights.key_by_query_head), moved)
    before, after = ([relation.norm for relation in relations(*in_span(*pair), rotary.matrix(3))] for pair in pairs)
    assert before != pytest.approx(after, rel=1e-3)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
LLAMAS = {
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    # RoPE in the first layer alone
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    **{kind: (kind, KINDS) for kind in ("cohere2", "exaone4")},
}


def llama_like(case):
    kind, options = LLAMAS[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**CASES_OF_FAMILIES["llama"][1], **options})
    return AutoModelForCausalLM.from_config(config).eval()


def attention_of(model, site):
    """What enters a model's attention (seq, hidden), and the logarithms of its weights (heads, seq, seq)."""
    model.set_attn_implementation("eager")
    entered = []

    def enter(_, args, kwargs):
        entered.append(kwargs.get("hidden_states", args[0] if args else None))

    with hooked([site.attention.register_forward_pre_hook(enter, with_kwargs=True)]):
        weights = model(make_tokens(1, 7), output_attentions=True).attentions[site.layer][0]
    return entered[0][0], weights.log()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "case", ["gpt_neox", "gpt2", "llama", "llama_yarn", "mistral", "gptj", "phi3", "smollm3", "cohere2"]
)
@torch.no_grad()
def test_attention_weights_of_the_whole_model_follow_from_the_relation(case, layer):
    """log a_ij − log a_i0 = scale · (x_i B(i−j) x_j − x_i B(i) x_0), which needs every sign and pairing right."""
    model = llama_like(case) if case in LLAMAS else make_model(case)
    site = find_sites(model.double())[layer]
    for target in ("query", "key"):
        if site.projection_module(target).bias is not None:
            site.projection_module(target).bias.zero_()
    x, attention = attention_of(model, site)
    weights = head_weights(model)[layer]
    size = weights.query.shape[-1]
    rotary = rotary_of(model, site)
    assert (rotary is None) == (case == "gpt2" or (case in ("smollm3", "cohere2") and layer == 1))
    assert rotary is None or (rotary.gain == 1) == (case != "llama_yarn")
    for head in range(len(weights.query)):
        query, key = weights.query[head], weights.key_by_query_head[head]
        for i in range(7):
            turns = [torch.eye(size).double() if rotary is None else rotary.matrix(i - j) for j in range(i + 1)]
            logits = torch.stack([x[i] @ query @ turns[j] @ key.T @ x[j] for j in range(i + 1)]) / size**0.5
            expected = logits - logits[0]
            assert attention[head, i, : i + 1] - attention[head, i, 0] == pytest.approx(expected, abs=2e-5)


def test_the_angles_of_gpt_j_may_lie_in_a_module_of_the_model():
    """From transformers 5.24 on they do."""
    model = make_model("gptj")
    sites = find_sites(model)
    expected = rotary_of(model, sites[0]).angles
    if hasattr(sites[0].attention, "embed_positions"):
        holder = model.transformer.rotary_emb = type("RotaryEmbedding", (nn.Module,), {})()
        holder.register_buffer("embed_positions", sites[0].attention.embed_positions)
        for site in sites:
            del site.attention.embed_positions
    assert torch.equal(rotary_of(model, sites[0]).angles, expected)


NORMED = {
    "qwen3": ("qwen3", {**CASES_OF_FAMILIES["qwen3"][1]}, 0.0),
    "gemma3": ("gemma3_text", {**CASES_OF_FAMILIES["llama"][1], "head_dim": K, "query_pre_attn_scalar": K}, 1.0),
    "olmo2": ("olmo2", CASES_OF_FAMILIES["llama"][1], 0.0),  # one norm for all heads together
}
"""Models that norm queries and keys: type, options, and what is added to the weight of a norm."""


@pytest.mark.parametrize("case", NORMED)
@torch.no_grad()
def test_gains_of_norms_behind_the_projections_are_in_the_relation(case):
    """The logit is x B(i−j) y / (rms of q, rms of k), with B by hand; the attention weights say that it is so."""
    kind, options, added = NORMED[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options, rms_norm_eps=1e-12)).eval()
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.copy_(torch.randn_like(parameter))
    model = model.double()
    attention, site = model.model.layers[0].self_attn, find_sites(model)[0]
    x, log_weights = attention_of(model, site)
    rotary = rotary_of(model, site)
    by_head = {one.head: one for one in head_relations(model, head_weights(model), offsets=(0, 3)) if one.layer == 0}

    def sides(projection, norm):
        gain, weight = norm.weight + added, projection.weight
        size = (x @ weight.T).view(7, -1, len(gain)).pow(2).mean(-1).sqrt()  # (seq, heads), or one for all heads
        folded = (weight.T * gain.repeat(len(weight) // len(gain))).view(HIDDEN, -1, K)
        return folded, size.expand(7, folded.shape[1])

    query, by_query = sides(attention.q_proj, attention.q_norm)
    key, by_key = sides(attention.k_proj, attention.k_norm)
    for head, one in by_head.items():
        mine, theirs = query[:, head], key[:, one.key_head]
        for offset, relation in one.by_offset.items():
            same(relation, direct(mine @ rotary.matrix(offset) @ theirs.T), 1e-6)
        for i in range(7):
            logits = torch.stack([x[i] @ mine @ rotary.matrix(i - j) @ theirs.T @ x[j] for j in range(i + 1)]) / K**0.5
            logits = logits / by_query[i, head] / by_key[: i + 1, one.key_head]
            row = log_weights[head, i, : i + 1]
            assert row - row[0] == pytest.approx(logits - logits[0], abs=2e-4)


def test_norms_that_do_more_than_scale_are_left_out():
    model = make_model("llama")
    for site in find_sites(model):
        assert norm_gains(site) is None
        assert not normed(site.attention, site.heads)
        for norm in (torch.nn.LayerNorm(K), torch.nn.LayerNorm(K, bias=False), torch.nn.RMSNorm(K)):
            site.attention.q_norm = site.attention.k_norm = norm
            assert (norm_gains(site) is None) == isinstance(norm, torch.nn.LayerNorm)
            assert normed(site.attention, site.heads)


def test_rotary_gain_and_columns():
    rotary = Rotary(4, torch.tensor([0]), torch.tensor([1]), torch.tensor([0.3]).double(), gain=1.5)
    vectors = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64)
    query, key = (rotary.turn(v, torch.tensor([[p]])) for v, p in zip(vectors, (9, 4), strict=True))
    expected = vectors[0].flatten() @ rotary.matrix(5) @ vectors[1].flatten()
    assert float((query * key).sum()) == pytest.approx(float(expected), rel=1e-12)


def test_layers_of_several_kinds_have_their_own_angles():
    options = {"head_dim": K, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    config = AutoConfig.for_model("gemma3_text", **{**CASES_OF_FAMILIES["llama"][1], **options})
    model = AutoModelForCausalLM.from_config(config)
    for site, base in zip(find_sites(model), (1e4, 1e6), strict=True):
        expected = base ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
        assert rotary_of(model, site).angles.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@given(heads=st.integers(1, 3), seed=st.integers(0, 10_000), offset=st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_any_gauge_of_a_turning_head_changes_nothing(heads, seed, offset):
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, heads, 20, 6, generator=generator, dtype=torch.float64)
    rotary = Rotary(6, torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([1.0, 0.1]).double())
    before = relations(*in_span(query, key), rotary.matrix(offset))
    after = relations(*in_span(*change_gauge(query, key, random_gauge(6, rotary, seed))), rotary.matrix(offset))
    for old, new in zip(before, after, strict=True):
        same(new, old, 1e-8)


def test_a_layer_without_rope_has_no_offsets():
    model = llama_like("exaone4")
    heads = head_relations(model, head_weights(model), offsets=(0, 3))
    assert {one.layer: sorted(one.by_offset) for one in heads} == {0: [0, 3], 1: [0]}


def test_models_without_rope_do_not_turn():
    for case in ("gpt2", "opt", "bloom", "falcon_per_head"):
        model = make_model(case)
        assert {rotary_of(model, site) for site in find_sites(model)} == {None}


@pytest.mark.parametrize("case", CASES)
def test_lora_is_in_the_matrices_after_patching_and_not_before(case):
    model = make_model(case)
    names = {"gpt_neox": ["query_key_value"], "gpt2": ["c_attn"], "llama": ["q_proj", "k_proj"]}[case]
    before = head_weights(model)[0]
    patch(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    wrapper = find_sites(model)[0].attention.get_submodule(names[0])
    delta = wrapper.get_delta_weight("lora").double().detach()  # (out, in), or (in, out) of a Conv1D
    delta = delta if case == "gpt2" else delta.T
    moved = {
        "gpt_neox": lambda: delta.view(HIDDEN, HEADS, 3, K)[:, :, 0].movedim(1, 0),
        "gpt2": lambda: delta[:, :HIDDEN].view(HIDDEN, HEADS, K).movedim(1, 0),
        "llama": lambda: delta.view(HIDDEN, HEADS, K).movedim(1, 0),
    }[case]()
    after, base = head_weights(model)[0], head_weights(model, patched=False)[0]
    assert torch.equal(base.query, before.query)
    assert (after.query - before.query).flatten().tolist() == pytest.approx(moved.flatten().tolist(), abs=1e-5)
    assert float(moved.abs().max()) > 1e-3


def test_a_literal_query_halves_its_anchor_and_a_preserving_one_does_not():
    model = make_model("llama")
    before = head_weights(model)[0].query
    literal = head_weights(patch(make_model("llama"), NonlinearQueryConfig(form="literal")))[0].query
    of_x = NonlinearQueryConfig(form="literal", anchor="identity")
    identity = head_weights(patch(make_model("llama"), of_x))[0].query
    preserving = head_weights(patch(make_model("llama"), NonlinearQueryConfig()))[0].query
    assert torch.equal(literal, before / 2)
    assert torch.equal(preserving, before)
    assert torch.equal(identity.movedim(0, 1).reshape(HIDDEN, HIDDEN), torch.eye(HIDDEN).double() / 2)


@pytest.mark.parametrize("case", ["llama", "qwen3"])  # qwen3 norms the query before it is scaled
def test_a_temperature_multiplies_its_heads_relation(case):
    model = patch(make_model(case), [QueryTemperatureConfig(), LoraConfig(r=2, target_modules=["q_proj"])])
    tau = torch.tensor([0.5, -0.5, 0.0, 1.0])
    for name, parameter in model.named_parameters():
        if "temperature_query" in name:
            parameter.data.copy_(tau)
    for before, after in zip(head_weights(model, patched=False), head_weights(model), strict=True):
        torch.testing.assert_close(after.query, before.query * (1 + tau.double())[:, None, None])
        assert torch.equal(after.key, before.key)


def test_offsets_that_are_none_are_refused():
    for offsets in ((), (-1, 2)):
        with pytest.raises(HfpatchError, match="offsets"):
            head_relations(make_model("llama"), [], offsets)
