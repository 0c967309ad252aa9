"""The section of a recipe: what it takes and what it refuses, each in one line."""

import warnings

import pytest
import torch

from hfpatch.errors import HfpatchError
from hfpatch.models import load_scratch
from hfpatch.recipes.models import split_architecture
from hfpatch.training.architecture import build_model

TINY = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 4}


def test_left_out_everything_is_stock():
    settings, left = split_architecture(TINY)
    assert left == TINY
    assert (settings.query.path, settings.biases) == ("linear", True)
    assert settings.mlp_width is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": {"pth": "linear"}}, "unknown key 'query.pth'.*'path'"),
        ({"query": {"path": "cubic"}}, "query.path"),
        ({"query": {"path": "identity", "rank": 4}}, "rank has no effect with path: identity"),
        ({"query": {"path": "linear", "targets": ["key"]}}, "targets has no effect"),
        ({"query": {"rank": 0}}, "query.rank"),
        ({"query": {"targets": []}}, "must name query, key or value"),
        ({"query": {"targets": ["query", "query"]}}, "at most once"),
        ({"query": {"fused": True, "input_norm": "layernorm"}}, "commute"),
        ({"query": None}, "query is empty"),
        ({"mlp_width": -1}, "mlp_width"),
        ({"mlp_width": float("nan")}, "mlp_width"),
        ({"mlp_width": 4, "n_inner": 128}, "mlp_width and n_inner mean the same"),
        ({"query": {"path": "linear", "fused": True}}, "fused has no effect with path: linear"),
        ({"query": {"path": "residual", "anchor": "weight"}}, "anchor has no effect with path: residual"),
        ({"query": {"activation": "gelu_new"}}, "query.activation"),
        ({"query": {"input_norm": "batchnorm"}}, "query.input_norm"),
        ({"query": {"rank": 2.5}}, "query.rank"),
        ({"query": "nonlinear"}, "must be a mapping"),
        ({"biases": "no"}, "must be a boolean"),
        ({"mlp_width": 0.001}, "architecture.mlp_width: 0.001 times d=32 is below 1"),
        ({"n_embd": 36, "n_head": 6, "query": {"rank": 10**6}}, "architecture.query: rank=1000000 must be at most"),
    ],
)
def test_mistakes_are_one_clear_line(changes, message):
    with pytest.raises(HfpatchError, match=message) as caught:
        build_model({**TINY, **changes})
    assert str(caught.value).startswith("architecture")


def test_an_odd_width_is_fine_where_no_half_is_asked_for():
    for query in ({"rank": 16}, {"path": "identity"}, {"path": "residual"}):
        assert build_model({**TINY, "n_embd": 33, "n_head": 3, "query": query}).config.hidden_size == 33


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ({}, "a parameter-free x·x and f(x)·f(x)"),
        ({"anchor": "weight"}, "f(x)·f(x)"),
        ({"path": "residual"}, "a parameter-free x·x and f(x)·f(x)"),
        ({"path": "identity"}, "a parameter-free x·x"),
    ],
)
def test_nonlinear_keys_warn_of_the_terms_that_they_bring_once(query, terms, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build_model({**TINY, "n_layer": 2, "query": {**query, "targets": ["query", "key", "value"]}})
        model.save_pretrained(tmp_path)
        load_scratch(tmp_path)
    shown = [str(warning.message) for warning in caught if "architecture" in str(warning.message)]
    assert shown == [f"architecture.query.targets: with a path in both query and key the logits hold {terms}"]


@pytest.mark.parametrize("targets", [["query", "value"], ["key"], ["value"]])
def test_a_query_or_a_key_alone_warns_of_nothing(targets):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_model({**TINY, "query": {"targets": targets}})


def test_an_identity_in_query_and_key_is_attention_by_the_gram_matrix():
    """The warning's claim: the logits are x xᵀ, with no parameter in them."""
    with pytest.warns(UserWarning, match="parameter-free"):
        model = build_model({**TINY, "n_head": 1, "query": {"path": "identity", "targets": ["query", "key"]}}).eval()
    attention, x = model.transformer.h[0].attn, torch.randn(1, 5, 32)
    logits = (x @ x.mT / 32**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    with torch.no_grad():
        value = attention.c_attn(x)[..., 64:]
        expected = attention.c_proj(logits.softmax(-1) @ value)
        torch.testing.assert_close(attention(x)[0], expected)
