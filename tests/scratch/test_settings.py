"""The section of a recipe: what it takes and what it refuses, each in one line."""

import pytest
import torch

from hfpatch.errors import HfpatchError
from hfpatch.scratch import split_architecture
from hfpatch.training.architecture import build_model

TINY = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 4}


def test_left_out_everything_is_stock():
    settings, left = split_architecture(TINY)
    assert left == TINY
    assert (settings.query.path, settings.biases, settings.mlp_width, settings.head_size) == (
        "linear",
        True,
        None,
        None,
    )


def test_a_recipes_architecture_becomes_the_model():
    model = build_model({**TINY, "biases": False, "mlp_width": 2.5, "query": {"path": "nonlinear", "rank": 3}}, seed=2)
    block = model.transformer.h[0]
    assert block.attn.c_attn.paths["query"].f.up.weight.shape == (3, 32)
    assert block.mlp.c_fc.weight.shape == (80, 32)
    again = build_model({**TINY, "biases": False, "mlp_width": 2.5, "query": {"path": "nonlinear", "rank": 3}}, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"query": {"pth": "linear"}}, "unknown key 'query.pth'.*'path'"),
        ({"query": {"path": "cubic"}}, "query.path"),
        ({"query": {"path": "identity", "rank": 4}}, "rank has no effect with path: identity"),
        ({"query": {"path": "linear", "targets": ["key"]}}, "targets has no effect"),
        ({"query": {"rank": 0}}, "query.rank"),
        ({"query": {"targets": []}}, "must name query, key or value"),
        ({"query": {"targets": ["query", "query"]}}, "at most once"),
        ({"query": {"source": "mlp", "fused": True}}, "cannot go with source: mlp"),
        ({"query": {"source": "mlp", "targets": ["key"]}}, "feeds the query alone"),
        ({"query": {"fused": True, "input_norm": "layernorm"}}, "commute"),
        ({"query": None}, "query is empty"),
        ({"mlp_width": -1}, "mlp_width"),
        ({"head_size": 0}, "head_size"),
    ],
)
def test_mistakes_are_one_clear_line(own, message):
    with pytest.raises(HfpatchError, match=message) as caught:
        split_architecture({**TINY, **own})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("architecture")
