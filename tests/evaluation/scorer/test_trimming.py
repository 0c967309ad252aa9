"""The last block at scored positions: the same features there, and nothing left out where that would change them."""

import families
import pytest
import torch
from peft import LoraConfig
from torch import nn

from hfpatch import PreProjectionConfig, patch
from hfpatch.evaluation.scorer import Scorer, TokenRequest, scorer, trimming
from hfpatch.evaluation.scorer.exactness import try_padding
from hfpatch.evaluation.scorer.head import BodyAndHead, WholeModel
from hfpatch.evaluation.scorer.trimming import behind_attention, only_at
from hfpatch.evaluation.scorer.trimming import trimmable as candidates
from hfpatch.sites import survey

ROWS, NODES = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 8, 4, 7])
MIXTRAL = {**families.LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}


@torch.no_grad()
def trimmable(model, parts=None):
    """The modules that a trial lets skip positions."""
    parts = parts or BodyAndHead(model.base_model, model.get_output_embeddings())
    modules = behind_attention(model, parts)
    padding = try_padding(model, parts, 5, 16, modules)
    return candidates(modules) if padding.trims else ()


@torch.no_grad()
def features(model, modules):
    tokens = families.make_tokens(3, 9)
    with only_at(modules, ROWS, NODES, tokens):
        return model.base_model(tokens, use_cache=False)[0]


def assert_same_features(model, modules):
    trimmed, expected = (features(model, chosen)[ROWS, NODES] for chosen in (modules, ()))
    torch.testing.assert_close(trimmed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", families.FAMILIES)
def test_the_last_block_computes_scored_positions_alone_and_the_same(case):
    model = families.make_model(case)
    modules = trimmable(model)
    last = next(name for name, _ in model.named_modules() if name.endswith(".1"))
    inside = set(map(id, model.get_submodule(last).modules()))
    assert len(modules) == (3 if model.config.model_type == "opt" else 2)
    assert all(id(module) in inside for module in modules)
    for module in modules:
        counts = set()  # how many positions each of its matrix products computes
        handles = [
            part.register_forward_hook(lambda _module, _args, out, counts=counts: counts.add(out.shape[:-1].numel()))
            for part in module.modules()
            if not list(part.children()) and any(parameter.dim() > 1 for parameter in part.parameters())
        ]
        features(model, [module])
        for handle in handles:
            handle.remove()
        assert counts == {len(ROWS)}
    assert_same_features(model, modules)
    assert not torch.equal(features(model, modules)[0, 1], features(model, ())[0, 1])


def test_experts_and_patched_models_are_trimmed_too(monkeypatch):
    monkeypatch.setitem(families.CASES, "mixtral", ("mixtral", MIXTRAL))
    patched = families.make_model("llama")
    patch(patched, [PreProjectionConfig(content_skip=True), LoraConfig(target_modules=["o_proj", "up_proj"])]).eval()
    families.perturb(patched)
    for model in (families.make_model("mixtral"), patched):
        modules = trimmable(model)
        assert len(modules) == 2
        assert_same_features(model, modules)


class Other(nn.Module):
    """An MLP that looks at the positions before, or gives more than one thing."""

    def __init__(self, mlp, *, pair=False):
        super().__init__()
        self.mlp, self.pair = mlp, pair

    def forward(self, hidden):
        return (self.mlp(hidden), hidden) if self.pair else self.mlp(hidden.cumsum(dim=1))


def test_what_mixes_positions_runs_twice_or_cannot_be_put_back_is_left_whole():
    model = families.make_model("llama")
    model.model.layers[-1].mlp = Other(model.model.layers[-1].mlp)
    assert trimmable(model) == ()
    model = families.make_model("llama")
    block = model.model.layers[-1]
    block.mlp = Other(block.mlp, pair=True)
    block.mlp.register_forward_hook(lambda _module, _arguments, output: output[0])
    assert [type(module) for module in trimmable(model)] == [nn.Linear]  # someone watches the other
    block.mlp._forward_hooks.clear()
    assert trimmable(model) == ()
    model = families.make_model("llama")
    model.model.layers[-1] = model.model.layers[0]
    assert trimmable(model) == ()


def test_a_watched_module_is_left_whole():
    model = families.make_model("gpt_neox")
    shapes = []
    block = model.gpt_neox.layers[-1]
    block.mlp.dense_4h_to_h.register_forward_hook(lambda _module, _arguments, output: shapes.append(output.shape))
    assert trimmable(model) == (block.attention.dense,)
    request = TokenRequest.cut(list(range(3, 15)), [4], max_length=40)
    Scorer(model, 40).score([request], lambda answers: None)
    assert {shape[1] for shape in shapes} >= {12}
    assert 1 not in {shape[1] for shape in shapes}


def test_the_model_is_surveyed_once_and_watched_at_every_call(monkeypatch):
    surveys, trims = [], []
    monkeypatch.setattr(trimming, "survey", lambda model: surveys.append(model) or survey(model))
    monkeypatch.setattr(scorer, "only_at", lambda modules, *rest: trims.append(modules) or only_at(modules, *rest))
    model = families.make_model("llama")
    scores = Scorer(model, 40, weigh_trials=False)
    requests = [TokenRequest.cut(list(range(3, end)), [4], max_length=40) for end in (9, 15)]
    scores.score(requests, lambda answers: None)
    before, last = len(surveys), model.model.layers[-1]
    scores.score(requests, lambda answers: None)
    assert len(surveys) == before
    last.mlp.down_proj.register_forward_hook(lambda *call: None)
    scores.score(requests, lambda answers: None)
    assert trims[-2:] == [(last.self_attn.o_proj, last.mlp), (last.self_attn.o_proj,)]


def test_recurrent_layers_and_whole_models_are_left_whole(monkeypatch):
    lfm2 = {**families.LLAMA, "layer_types": ["full_attention", "conv"], "block_auto_adjust_ff_dim": False}
    monkeypatch.setitem(families.CASES, "lfm2", ("lfm2", lfm2))
    model = families.make_model("lfm2")
    assert_same_features(model, trimmable(model))
    assert trimmable(model, WholeModel(model)) == ()


def test_no_hook_stays_behind():
    model = families.make_model("gpt2")
    modules = trimmable(model)
    with pytest.raises(RuntimeError, match="interrupted"), only_at(modules, ROWS, NODES, families.make_tokens(3, 9)):
        raise RuntimeError("interrupted")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
