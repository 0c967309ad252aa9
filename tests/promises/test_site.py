"""The promises on the site notice every kind of wrong declaration, and leave the model as it was."""

import functools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from families import HIDDEN, LLAMA, SHARED, make_config, make_model, unchanged
from peft import LoraConfig
from torch import nn
from transformers import CONFIG_MAPPING, BertConfig, BertForMaskedLM, GraniteConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import hfpatch
from hfpatch import NonlinearQueryConfig, PreProjectionConfig, QueryTemperatureConfig
from hfpatch.sites import Columns, Family, discovery, separate
from hfpatch.sites import family as registry
from hfpatch.sites.layouts import whole
from hfpatch.twins import random_model, twin

SKIP = PreProjectionConfig(content_skip=True)
ATTENTION, PURE, REACHES, ARRIVES, COLUMNS = (
    "attention is where it is declared", "pure: only the attention sees the change", "x~ reaches query, key and value",
    "the content skip reaches the residual", "projections are as declared",
)  # fmt: skip
QUERY = NonlinearQueryConfig()
TEMPERATURE, HEADS = QueryTemperatureConfig(), "temperatures scale their own heads"
LORA = LoraConfig(r=2, target_modules="all-linear")


@pytest.fixture
def declare(monkeypatch, only):
    monkeypatch.setattr(registry, "DECLARED", dict(registry.DECLARED))
    only(ATTENTION, PURE, REACHES, ARRIVES, COLUMNS, HEADS)

    def register(model_type, **changes):
        llama = Family(
            name="wrong", model_types=(model_type,), layers="layers", attention="self_attn", qkv=separate(),
            output="o_proj",
        )  # fmt: skip
        registry.DECLARED[model_type] = replace(llama, **changes)

    return register


def failures(model, config):
    with unchanged(model):
        return {v.promise for v in hfpatch.check(model, config).verdicts if not v.holds}


@pytest.mark.parametrize("kind", ["inkling2_text", "gemma3n_text", "zaya", "beam", "minimax"])
def test_unusual_residual_streams_are_followed(kind, declare):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    assert not failures(twin(CONFIG_MAPPING[kind]()), SKIP)


def test_a_factor_that_nobody_declared(declare):
    model = twin(GraniteConfig(residual_multiplier=0.22))
    assert not failures(model, SKIP)
    declare("granite")
    assert failures(model, SKIP) == {ARRIVES}


def test_a_wrapper_that_holds_the_residual(declare):
    assert not failures(twin(BertConfig(is_decoder=True)), SKIP)
    inner = separate(**{target: f"self.{target}" for target in ("query", "key", "value")})
    ends = {"exit": "attention.output.dense", "output": None}
    declare("bert", layers="encoder.layer", attention="attention", qkv=inner, **ends)
    assert PURE in failures(twin(BertConfig(is_decoder=True)), SKIP)


def test_an_encoder_whose_tokens_see_all_others(declare):
    """Every position is in as many sums; the first one has no earlier keys."""
    config = BertConfig(**{**SHARED, "intermediate_size": 48, "max_position_embeddings": 64})
    model = BertForMaskedLM(config).eval()
    for method in (SKIP, QUERY, TEMPERATURE):
        assert not failures(model, method)


@functools.cache
def three_blocks(case):
    """Return a tiny model whose middle block is neither the first nor the last; no test changes it."""
    if case == "granite":
        return random_model(GraniteConfig(**LLAMA | {"num_hidden_layers": 3, "residual_multiplier": 0.22}))
    return random_model(make_config(case, **{"n_layer" if case == "gpt2" else "num_hidden_layers": 3}))


class ScaledBranch(LlamaDecoderLayer):
    """A block that changes its branch once more before it adds it."""

    def forward(self, hidden_states, **kwargs):
        branch, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.between(branch)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Between(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, branch):
        return self.change(branch)


BETWEEN = {
    "a quotient": lambda: Between(lambda branch: branch / 1.7),  # ESM C
    "a factor near one": lambda: Between(lambda branch: branch * 1.001),
    "a scale of each channel": lambda: Between(lambda branch: branch * torch.linspace(0.1, 1, HIDDEN)),  # Mimi, DINO
    "a gate": lambda: Between(lambda branch: branch * branch.sigmoid()),
    "a norm": lambda: nn.LayerNorm(HIDDEN),
    "a matrix": lambda: nn.Linear(HIDDEN, HIDDEN),
    "a second sum": lambda: Between(lambda branch: branch + 0.5 * branch),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_whatever_is_between_the_branch_and_the_sum_is_seen(what, declare):
    model = make_model("llama")
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.__class__, layer.between = ScaledBranch, BETWEEN[what]()
    declare("llama")
    assert failures(model, SKIP) == {ARRIVES}
    declare("llama", exit="between")
    assert not failures(model, SKIP)


class CalledTwice(LlamaAttention):
    """The query's projection is also that of relative positions, as in DeBERTa."""

    def forward(self, hidden_states, **kwargs):
        out, weights = super().forward(hidden_states=hidden_states, **kwargs)
        return out + self.q_proj(torch.ones(3, HIDDEN)).mean(0), weights


class NeverCalled(LlamaAttention):
    """Weights are read without a call of the projections, as in WavLM."""

    def forward(self, hidden_states, **kwargs):
        modules = {name: getattr(self, name) for name in ("q_proj", "k_proj", "v_proj")}
        for name, module in modules.items():
            self.add_module(name, Between(partial(F.linear, weight=module.weight)))
        out = super().forward(hidden_states=hidden_states, **kwargs)
        for name, module in modules.items():
            self.add_module(name, module)
        return out


@pytest.mark.parametrize("config", [SKIP, QUERY, LORA], ids=lambda config: type(config).__name__)
@pytest.mark.parametrize(("kind", "says"), [(CalledTwice, "q_proj is called 2"), (NeverCalled, "q_proj is never")])
def test_a_projection_that_does_not_read_the_hidden_state_once_is_seen(kind, says, config, declare, only):
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    declare("llama")  # read in its source, it would be refused
    only(COLUMNS)
    (verdict,) = hfpatch.check(model, config).verdicts
    assert not verdict.holds
    assert verdict.measured.startswith(says)
    refused = dict.fromkeys(("query", "key", "value"), "it is not called for the hidden state alone")
    declare("llama", refusals=refused)
    assert (config is QUERY) or not failures(model, config)


def entries_without(*missing):
    """x~ reaches the projections of some targets alone."""

    def change(site, block):
        kept = {"query", "key", "value"} - set(missing)
        return replace(site, entries=tuple(site.projection_module(target) for target in sorted(kept)))

    return change


def exit_at(path):
    return lambda site, block: replace(site, exit=block.get_submodule(path), exit_path=path)


def norm_at(path):
    return lambda site, block: replace(site, norm=block.get_submodule(path))


def output_at(path):
    return lambda site, block: replace(site, output_path=f"{site.path}.{path}")


def factor(value):
    return lambda site, block: replace(site, exit_factor=value)


def query(change):
    """Another projection, made of those of the site, is taken for that of the query."""
    return lambda site, block: replace(site, projections={**site.projections, "query": change(**site.projections)})


def swapped(one, other):
    def change(site, block):
        swap = {one: site.projections[other], other: site.projections[one]}
        return replace(site, projections={**site.projections, **swap})

    return change


def columns(change):
    return query(lambda query, **_: replace(query, columns=change(query.columns)))


key_as_query = query(lambda key, **_: key)


def attention_at(path, **projections):
    """Something without a softmax is taken for the attention."""

    def change(site, block):
        module = block.get_submodule(path)
        modules = {target: whole(module, name) for target, name in projections.items()}
        at = site.path.rpartition(".")[0]
        return replace(
            site, attention=module, path=f"{at}.{path}", host_path=f"{at}.{path}", entries=(module,), exit=module,
            projections=modules,
        )  # fmt: skip

    return change


first_half = columns(lambda c: replace(c, length=c.length // 2))
every_second_column = columns(lambda c: Columns(c.size // 2, 2, 0, 1))
half_of_the_heads = columns(lambda c: replace(c, groups=c.groups // 2, width=c.width * 2))
shifted = columns(lambda c: replace(c, start=c.start + c.length // 2))


def heads(**changes):
    return lambda site, block: replace(site, heads=replace(site.heads, **changes))


MLP = {"query": "gate_proj", "key": "gate_proj", "value": "up_proj"}

WRONG = [
    *((entries_without(*missing), "llama", SKIP, REACHES)
      for missing in [("query", "key"), ("key", "value"), ("query", "value"), ("query",), ("key",), ("value",)]),
    (entries_without("key", "value"), "gemma2", SKIP, REACHES),
    (entries_without("query"), "granite", SKIP, REACHES),
    (norm_at("post_attention_layernorm"), "llama", SKIP, REACHES),
    (norm_at("post_attention_layernorm"), "llama", SKIP, PURE),
    (norm_at("post_attention_layernorm"), "gpt_neox", SKIP, REACHES),
    (norm_at("ln_2"), "gpt2", SKIP, PURE),
    (exit_at("mlp"), "llama", SKIP, ARRIVES),
    (exit_at("mlp.down_proj"), "granite", SKIP, ARRIVES),
    (exit_at("mlp"), "gpt2", SKIP, ARRIVES),
    (exit_at("post_feedforward_layernorm"), "gemma2", SKIP, ARRIVES),
    (exit_at("self_attn"), "gemma2", SKIP, ARRIVES),
    (exit_at("post_attention_layernorm"), "gpt_neox", SKIP, ARRIVES),
    (exit_at("input_layernorm"), "llama", SKIP, ARRIVES),
    (exit_at("post_attention_layernorm"), "llama", SKIP, ARRIVES),
    (exit_at("post_attention_layernorm"), "granite", SKIP, ARRIVES),
    (exit_at("ln_2"), "gpt2", SKIP, ARRIVES),
    (exit_at("pre_feedforward_layernorm"), "gemma2", SKIP, ARRIVES),
    (exit_at("self_attn_layer_norm"), "opt_post_norm", SKIP, ARRIVES),  # what the sum passes, not the branch
    (exit_at("post_attention_layernorm"), "bloom_post_norm_residual", SKIP, ARRIVES),
    (factor(0.5), "llama", SKIP, ARRIVES),
    (factor(0.5), "gpt_neox", SKIP, ARRIVES),
    (factor(1.0), "granite", SKIP, ARRIVES),
    (attention_at("mlp", **MLP), "llama", SKIP, REACHES),
    (attention_at("mlp", **MLP), "llama", LORA, ATTENTION),
    (output_at("q_proj"), "llama", LORA, ATTENTION),
    (output_at("query_key_value"), "gpt_neox", SKIP, ATTENTION),
    (attention_at("mlp", **MLP), "llama", SKIP, PURE),
    (attention_at("mlp", **MLP), "llama", QUERY, COLUMNS),
    (attention_at("mlp", query="c_fc", key="c_fc", value="c_fc"), "gpt2", SKIP, REACHES),
    (first_half, "llama", QUERY, COLUMNS),
    (first_half, "gpt_neox", QUERY, COLUMNS),
    (first_half, "gpt2", QUERY, COLUMNS),
    (every_second_column, "gemma2", QUERY, COLUMNS),
    (half_of_the_heads, "gpt_neox", QUERY, COLUMNS),
    (shifted, "gpt2", QUERY, COLUMNS),
    (shifted, "gpt_neox", QUERY, COLUMNS),
    *((swapped(*pair), case, config, COLUMNS)
      for pair in (("key", "value"), ("query", "key"), ("query", "value"))
      for case, config in (("gemma2", SKIP), ("gpt2", QUERY), ("gpt_neox", LORA))),
    (key_as_query, "qwen3", QUERY, COLUMNS),
    (key_as_query, "gpt_neox", QUERY, COLUMNS),
    (heads(count=2), "llama", TEMPERATURE, HEADS),
    (heads(count=8), "gpt_neox", TEMPERATURE, HEADS),
    (heads(norm=None), "qwen3", TEMPERATURE, HEADS),
]  # fmt: skip


@pytest.mark.parametrize(("change", "case", "config", "promise"), WRONG)
def test_one_wrong_site_is_seen(change, case, config, promise, declare, monkeypatch, only):
    read = discovery.read_site

    def wrong(family, settings, at_block, *, layer, **options):
        site = read(family, settings, at_block, layer=layer, **options)
        return change(site, at_block) if layer == 1 else site

    model = three_blocks(case)
    monkeypatch.setattr(discovery, "read_site", wrong)
    only(promise)
    assert failures(model, config) == {promise}


@pytest.mark.parametrize("case", sorted({case for _, case, *_ in WRONG}))
def test_the_models_of_the_wrong_sites_pass_with_the_right_ones(case, declare):
    for config in (SKIP, QUERY, TEMPERATURE, NonlinearQueryConfig(targets=("query", "key", "value"))):
        assert not failures(three_blocks(case), config)


def test_a_block_whose_attention_is_left_out_is_seen(declare, monkeypatch):
    monkeypatch.setattr(discovery, "_has_attention", lambda family, block: block.self_attn.layer_idx != 1)
    for config in (SKIP, QUERY, LORA):
        assert ATTENTION in failures(three_blocks("qwen3"), config)


def test_the_norm_of_the_attention_is_a_right_place(declare):
    declare("llama", norm="input_layernorm")
    assert not failures(make_model("llama"), SKIP)
