import math

import pytest
import torch
from architectures.catalogue import make
from families import HIDDEN, make_model, make_tokens, perturb
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, ZambaConfig

from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, find_sites, patch, scale_patch
from hfpatch.analysis.ablation import ablate_layers, document_losses
from hfpatch.analysis.attention import head_attention
from hfpatch.analysis.heads import head_weights
from hfpatch.analysis.linearised import is_nonlinear, linearise
from hfpatch.analysis.norms import BUILT_IN, pre_projection_sizes, query_sizes, skip_norms, skip_sizes
from hfpatch.analysis.relation import head_relations
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.support.modes import hooked
from hfpatch.twins import twin

KINDS = ["gpt_neox", "gpt2", "llama"]


@pytest.fixture
def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def inputs_of(model, batch):
    """The hidden state that enters each attention module of a model without adapters."""
    states = []

    def keep(module, args, kwargs):
        states.append(kwargs.get("hidden_states", args[0] if args else None))

    handles = [site.attention.register_forward_pre_hook(keep, with_kwargs=True) for site in find_sites(model)]
    with hooked(handles), torch.no_grad():
        model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return states


def adapter_weights(model, ending):
    return [weight.detach() for name, weight in model.named_parameters() if name.endswith(ending)]


@pytest.mark.parametrize("kind", KINDS)
def test_skip_norms_beside_those_at_the_papers_init(kind):
    model = patch(make_model(kind), PreProjectionConfig(content_skip=True, init="paper"))
    norms = skip_norms(model)
    assert [norm.layer for norm in norms] == [0, 1]
    for norm, weight in zip(norms, adapter_weights(model, "preproj_skip.pre_projection.weight"), strict=True):
        assert norm.norm == pytest.approx(math.sqrt(float((weight.double() ** 2).sum())), rel=1e-6)
        assert norm.at_paper_init == pytest.approx(1e-4 * HIDDEN)
        assert norm.norm == pytest.approx(norm.at_paper_init, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_pre_projection_size_is_the_mean_over_tokens(kind, batch):
    model = make_model(kind)
    x = inputs_of(model, batch)[0]
    patch(model, PreProjectionConfig(init="paper"))
    (up, _), (down, _) = (adapter_weights(model, f"preproj_{what}.pre_projection.weight") for what in ("up", "down"))
    moved = torch.nn.functional.silu(x.double() @ up.double().T) @ down.double().T
    ratio = moved.norm(dim=-1) / x.double().norm(dim=-1)
    expected = float(ratio[batch["attention_mask"].bool()].mean())
    first, second = pre_projection_sizes(model, [batch])
    assert (first.layer, second.layer) == (0, 1)
    assert first.size == pytest.approx(expected, rel=1e-3)
    assert expected > 1e-5


def test_what_does_nothing_has_no_size_and_what_is_not_there_no_entry(batch):
    plain, bare = make_model("gpt_neox"), patch(make_model("gpt_neox"), PreProjectionConfig())
    assert skip_norms(plain) == pre_projection_sizes(plain, [batch]) == query_sizes(plain, [batch]) == []
    assert skip_norms(bare) == skip_sizes(bare, [batch]) == []
    assert [size.size for size in pre_projection_sizes(bare, [batch])] == [0.0, 0.0]
    with_skip = patch(make_model("gpt_neox"), PreProjectionConfig(content_skip=True, layers_to_transform=[1]))
    assert [(norm.layer, norm.norm) for norm in skip_norms(with_skip)] == [(1, 0.0)]
    alone = patch(make_model("gpt_neox"), PreProjectionConfig(expansion=0, content_skip=True, init="paper"))
    assert pre_projection_sizes(alone, [batch]) == []
    assert all(size.size > 0 for size in skip_sizes(alone, [batch]))
    assert len(skip_norms(alone)) == len(find_sites(alone))
    preserving = patch(make_model("llama"), NonlinearQueryConfig())
    assert [size.size for size in query_sizes(preserving, [batch])] == [0.0, 0.0]


def test_a_model_without_a_projection_of_the_query_has_sizes_of_its_values(batch):
    config = AutoConfig.for_model("jetmoe", vocab_size=96, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2,
                                  kv_channels=8, intermediate_size=48, num_local_experts=2)  # fmt: skip
    model = patch(AutoModelForCausalLM.from_config(config), NonlinearQueryConfig(targets="value", form="literal"))
    (sizes,) = query_sizes(model, [batch])
    assert sizes.target == "value"
    assert sizes.size > 0


def test_sizes_weight_tokens_not_batches(batch):
    model = patch(make_model("gpt_neox"), PreProjectionConfig(init="paper"))
    rows = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(2)]
    together, apart = pre_projection_sizes(model, [batch]), pre_projection_sizes(model, rows)
    assert [size.size for size in apart] == pytest.approx([size.size for size in together], rel=1e-5)
    means = [pre_projection_sizes(model, [row])[0].size for row in rows]
    assert together[0].size == pytest.approx((7 * means[0] + 4 * means[1]) / 11, rel=1e-5)


@torch.no_grad()
def query_of(kind, site, x):
    """x W_Q + b_Q, written out for each family's layout."""
    module = site.projection_module("query")
    weight = module.weight.T if kind == "gpt2" else module.weight  # a Conv1D holds the transpose
    out = x @ weight.T + (module.bias if module.bias is not None else 0.0)
    if kind == "gpt2":
        return out[..., :HIDDEN]
    if kind == "gpt_neox":  # per head: q, k, v
        return out.view(*out.shape[:-1], 4, 3, 8)[..., 0, :].flatten(-2)
    return out


def test_beside_a_pre_projection_the_query_sees_its_output(batch):
    alone = patch(make_model("gpt_neox"), NonlinearQueryConfig(form="literal"))
    both = patch(make_model("gpt_neox"), [PreProjectionConfig(init="paper"), NonlinearQueryConfig(form="literal")])
    assert query_sizes(both, [batch])[0].size != query_sizes(alone, [batch])[0].size
    assert len(pre_projection_sizes(both, [batch])) == 2


def test_the_model_is_left_as_it_was(batch):
    model = patch(make_model("gpt_neox"), [PreProjectionConfig(init="paper"), NonlinearQueryConfig()])
    model.train()
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    pre_projection_sizes(model, [batch])
    query_sizes(model, [batch])
    with pytest.raises(IndexError):
        pre_projection_sizes(model, [{"input_ids": torch.full((1, 3), 999)}])
    assert all(module.training for module in model.modules())
    assert hooks == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "llama", "gemma2", "bloom"])
@torch.no_grad()
def test_skip_size_is_that_of_the_skip_beside_what_the_branch_adds(case):
    """What joins the residual with the skip, less what joins it without, beside the latter."""
    model = patch(make_model(case), PreProjectionConfig(content_skip=True))
    perturb(model)
    ids, mask = make_tokens(), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    site, branches = find_sites(model)[0], []
    with_residual = case == "bloom"  # its attention adds the residual itself, which is read beside it

    def keep(module, args, output):
        branch = output[0] if isinstance(output, tuple) else output
        branches.append(branch - args[1] if with_residual else branch)

    skip = dict(model.named_parameters())[f"{site.path}.hfpatch_pre_projection.preproj_skip.pre_projection.weight"]
    kept = skip.clone()
    with hooked([site.exit.register_forward_hook(keep)]):
        model(ids, attention_mask=mask)
        skip.zero_()
        model(ids, attention_mask=mask)
        skip.copy_(kept)
    whole, branch = branches
    expected = ((whole - branch).norm(dim=-1) / branch.norm(dim=-1))[mask.bool()].mean()
    first, second = skip_sizes(model, [{"input_ids": ids, "attention_mask": mask}])
    assert (first.layer, second.layer) == (0, 1)
    assert first.size == pytest.approx(float(expected), rel=1e-3)
    assert expected > 0.01


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_query_sizes_and_cosines(kind, batch):
    """Of f beside the anchor, by the formulas."""
    model = make_model(kind)
    x = inputs_of(model, batch)[0]
    anchor = query_of(kind, find_sites(model)[0], x)
    patch(model, NonlinearQueryConfig(form="literal"))
    up, down = (adapter_weights(model, f"nonlinear_query_{what}.nonlinear_query.weight")[0] for what in ("up", "down"))
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    f = torch.nn.functional.gelu(normed @ up.T) @ down.T
    f = (f - f.mean(-1, keepdim=True)) / (f.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    ratio, cosine = f.norm(dim=-1) / anchor.norm(dim=-1), (f * anchor).sum(-1) / (f.norm(dim=-1) * anchor.norm(dim=-1))
    mask = batch["attention_mask"].bool()
    sizes = query_sizes(model, [batch])[0]
    assert (sizes.layer, sizes.adapter, sizes.target) == (0, "nonlinear_query", "query")
    assert sizes.size == pytest.approx(float(ratio[mask].mean()), rel=1e-4)
    assert sizes.cosine == pytest.approx(float(cosine[mask].mean()), abs=1e-5)


@torch.no_grad()
def test_the_anchor_of_a_second_query_is_the_scaled_output_of_the_first(batch):
    model = make_model("llama")
    x = inputs_of(model, batch)[0]
    anchor = query_of("llama", find_sites(model)[0], x)
    patch(model, [NonlinearQueryConfig(form="literal", rank=8), NonlinearQueryConfig(form="literal", rank=4)])
    scale_patch(model, 0.25)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    (up, more_up), (down, more_down) = (
        [w for w in adapter_weights(model, ".weight") if w.shape in ((8, HIDDEN), (4, HIDDEN))][:2],
        [w for w in adapter_weights(model, ".weight") if w.shape in ((HIDDEN, 8), (HIDDEN, 4))][:2],
    )
    f, g = (
        torch.nn.functional.layer_norm(torch.nn.functional.gelu(normed @ one.T) @ other.T, (HIDDEN,), eps=1e-5)
        for one, other in ((up, down), (more_up, more_down))
    )
    scaled = anchor + 0.25 * ((anchor + f) / 2 - anchor)
    mask = batch["attention_mask"].bool()
    first, second = [size for size in query_sizes(model, [batch]) if size.layer == 0]
    assert first.size == pytest.approx(float((f.norm(dim=-1) / anchor.norm(dim=-1))[mask].mean()), rel=1e-4)
    assert second.size == pytest.approx(float((g.norm(dim=-1) / scaled.norm(dim=-1))[mask].mean()), rel=1e-4)


def test_a_peft_model_is_analysed_like_a_patched_one(batch):
    config = PreProjectionConfig(init="paper", content_skip=True)
    wrapped, patched = get_peft_model(make_model("llama"), config), patch(make_model("llama"), config)
    for measure in (pre_projection_sizes, skip_sizes):
        sizes, expected = measure(wrapped, [batch]), measure(patched, [batch])
        assert [size.size for size in sizes] == [size.size for size in expected]
        assert len(sizes) == 2
    twice = get_peft_model(make_model("llama"), NonlinearQueryConfig(form="literal"))
    assert [size.adapter for size in query_sizes(twice, [batch])] == ["default"] * 2
    assert len(ablate_layers(twice, lambda m: document_losses(m, [batch])).without) == 3
    assert len(head_relations(twice, head_weights(twice))) == 8


@pytest.mark.parametrize("query", [{"fused": True}, {"anchor": "weight"}, {"path": "residual"}])
@torch.no_grad()
def test_the_f_that_a_model_was_pretrained_with(batch, query):
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=HIDDEN, n_layer=2, n_head=4, bos_token_id=0)
    model = build_scratch(config, ScratchSettings(query={"path": "nonlinear", **query})).eval()
    inputs, text = [], batch["attention_mask"].bool()
    with hooked([model.transformer.h[1].attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))]):
        model(**batch)
    x, path = inputs[0][text].double(), model.transformer.h[1].attn.c_attn.paths["query"].double()
    anchor = path.anchor(x) if "anchor" in query else x
    f, model = path.f(x), model.float()
    ratio, cosine = f.norm(dim=-1) / anchor.norm(dim=-1), (f * anchor).sum(-1) / (f.norm(dim=-1) * anchor.norm(dim=-1))
    sizes = query_sizes(model, [batch])[1]
    assert (sizes.layer, sizes.adapter, sizes.target) == (1, BUILT_IN, "query")
    assert (sizes.size, sizes.cosine) == pytest.approx((ratio.mean().item(), cosine.mean().item()), rel=1e-4)


def test_a_layer_that_is_not_below_its_attention_is_found():
    """Zamba's attention modules are tied, so that what is added stands beside them."""
    torch.manual_seed(0)
    model = twin(ZambaConfig())
    patch(model, [PreProjectionConfig(), NonlinearQueryConfig(form="literal")])
    perturb(model, std=0.3)
    sites = find_sites(model)
    assert not any("hfpatch" in name for site in sites for name, _ in site.attention.named_modules())
    assert all(is_nonlinear(site) for site in sites)
    tokens = [{"input_ids": torch.arange(12)[None]}]
    assert len([size for size in pre_projection_sizes(model, tokens) if size.size > 0]) == len(sites)
    assert len([size for size in query_sizes(model, tokens) if size.size > 0]) == len(sites)
    for before, after in zip(head_weights(model, patched=False), head_weights(model), strict=True):
        torch.testing.assert_close(after.query, before.query / 2)  # what the literal form leaves of x W_Q


ODD = {
    "gemma4_text/kv_shared": {"relation": "layer 2: no projection computes only the key"},
    "cpmant": {
        "sizes": "an attention reads 2 x 44 positions of 2 x 12 tokens, so none is a token's",
        "linearised": "an attention reads 2 x 44 positions of 2 x 12 tokens, so none is a token's",
        "attention": "layer 0: CpmAntAttention does not return its attention weights",
    },
    "prophetnet": {"skips": "prophetnet.decoder.layers.0.self_attn.out_proj runs in pieces, so that no output"},
}


@pytest.mark.parametrize(("case", "what"), [(case, what) for case in ODD for what in ODD[case]])
def test_what_a_model_does_not_have_is_refused_in_one_line(case, what):
    """Layers that read another one's keys, and attentions of more positions than the text has."""
    model = make(case)
    patch(model, PreProjectionConfig(content_skip=case == "prophetnet"))
    batch = {"input_ids": torch.arange(3, 27).reshape(2, 12)}
    measure = {
        "relation": lambda: head_weights(model),
        "sizes": lambda: pre_projection_sizes(model, [batch]),
        "skips": lambda: skip_sizes(model, [batch]),
        "linearised": lambda: linearise(patch(make(case), NonlinearQueryConfig(rank=2)), [batch], [batch]),
        "attention": lambda: head_attention(model, [batch]),
    }
    with pytest.raises(HfpatchError, match=f"^{ODD[case][what]}"):
        measure[what]()
