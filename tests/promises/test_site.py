"""The promises on the site notice every kind of wrong declaration, and leave the model as it was."""

from dataclasses import replace

import pytest
from families import make_model
from transformers import CONFIG_MAPPING, BertConfig, GraniteConfig

import hfpatch
from hfpatch import NonlinearQueryConfig, PreProjectionConfig
from hfpatch.bases import hash_weights
from hfpatch.promises import run
from hfpatch.sites import Family, find_sites, gated, separate
from hfpatch.sites import family as registry
from hfpatch.twins import twin

SKIP = PreProjectionConfig(content_skip=True)
PURE, ARRIVES, COLUMNS = (
    "pure: only the attention sees the change", "the content skip reaches the residual",
    "projections are what they are taken for",
)  # fmt: skip


@pytest.fixture
def declare(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    monkeypatch.setattr(run, "PROMISES", [p for p in run.PROMISES if p[0] in (PURE, ARRIVES, COLUMNS)])

    def register(model_type, **changes):
        llama = Family(
            name="wrong", model_types=(model_type,), layers="layers", attention="self_attn", qkv=separate(),
            output="o_proj",
        )  # fmt: skip
        registry._FAMILIES[model_type] = replace(llama, **changes)

    return register


def failures(model, config):
    before = hash_weights(model), list(model.state_dict())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    found = {v.promise for v in hfpatch.check(model, config).verdicts if not v.holds}
    assert (hash_weights(model), list(model.state_dict())) == before
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    return found


def bert(**options):
    return twin(BertConfig(is_decoder=True, **options))


BERT = {"layers": "encoder.layer", "exit": "attention.output.dense", "output": None}


@pytest.mark.parametrize("case", ["llama", "gemma2", "bloom", "gpt2", "opt_post_norm", "bloom_post_norm_residual"])
def test_right_declarations_pass(case, declare):
    assert not failures(make_model(case), SKIP)
    assert not failures(make_model(case), NonlinearQueryConfig())


@pytest.mark.parametrize("kind", ["inkling2_text", "gemma3n_text", "zaya", "beam", "minimax"])
def test_unusual_residual_streams_are_followed(kind, declare):
    assert not failures(twin(CONFIG_MAPPING[kind]()), SKIP)


def test_an_exit_before_the_norm_of_a_sandwich(declare):
    declare("gemma2")
    assert failures(make_model("gemma2"), SKIP) == {ARRIVES}


def test_a_factor_that_nobody_declared(declare):
    model = twin(GraniteConfig(residual_multiplier=0.22))
    assert not failures(model, SKIP)
    declare("granite")
    assert failures(model, SKIP) == {ARRIVES}


def test_a_factor_that_is_wrong(declare):
    declare("llama", factor=lambda block: 0.5)
    assert failures(make_model("llama"), SKIP) == {ARRIVES}


def test_a_wrapper_that_holds_the_residual(declare):
    assert not failures(bert(), SKIP)
    inner = {target: f"self.{target}" for target in ("query", "key", "value")}
    declare("bert", **{**BERT, "attention": "attention", "qkv": separate(**inner)})
    assert PURE in failures(bert(), SKIP)


@pytest.mark.parametrize("query", ["k_proj", "v_proj"])
def test_a_key_or_value_taken_for_the_query(declare, query):
    declare("qwen3", qkv=separate(query=query))
    assert failures(make_model("qwen3"), NonlinearQueryConfig()) == {COLUMNS}


@pytest.mark.parametrize("target", ["key", "value"])
def test_keys_and_values_act_as_such(declare, target):
    assert not failures(make_model("gpt_neox"), NonlinearQueryConfig(targets=(target,)))
    declare("llama", qkv=separate(key="v_proj", value="k_proj"))
    assert failures(make_model("llama"), NonlinearQueryConfig(targets=(target,))) == {COLUMNS}


def test_columns_that_are_not_the_query(declare):
    declare("llama", qkv=gated(query="v_proj"))
    assert failures(make_model("llama"), NonlinearQueryConfig()) == {COLUMNS}


def test_find_sites_does_not_touch_the_model():
    model = make_model("llama")
    before = hash_weights(model)
    find_sites(model)
    assert hash_weights(model) == before
