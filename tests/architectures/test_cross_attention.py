"""Decoders that read an encoder's states: self-attention computes the formula, cross-attention is left alone."""

import pytest
import torch
from architectures.catalogue import CASES, DECODERS, logits_of, options_of, tokens_for
from architectures.sweep import Bench, close, configuration, differ
from families import perturb
from transformers import CONFIG_MAPPING

import hfpatch
from hfpatch.twins import twin

WITH_IT = [
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
    "prophetnet", "trocr",
]  # fmt: skip
# Given an encoder's states, BigBird makes its self-attention a cross-attention, too; Reformer has none
BY_SWITCH = ["gpt2", "gpt-sw3", "xglm", *(kind for kind in DECODERS if kind not in ("big_bird", "reformer"))]
KINDS = [kind for kind in ["mllama", *WITH_IT, *BY_SWITCH] if kind in CASES]


def build(kind):
    switch = {"add_cross_attention": True} if kind in BY_SWITCH else {}
    return twin(CONFIG_MAPPING[kind](**options_of(kind), **switch))


@pytest.mark.parametrize("method", ["content skip", "nonlinear query"])
@pytest.mark.parametrize("kind", KINDS)
def test_self_attention_alone_is_changed(kind, method):
    base, model = build(kind), build(kind)
    tokens, encoded = tokens_for(base), torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    states = {"cross_attention_states" if kind == "mllama" else "encoder_hidden_states": encoded}
    plain = logits_of(base, tokens, **states)
    assert differ(plain, logits_of(base, tokens)), "the encoder's states do nothing"
    hfpatch.patch(model, configuration(method), names=["a"])
    assert torch.equal(logits_of(model, tokens, **states), plain)
    perturb(model, std=0.1)
    bench = Bench(kind, method, base, model, tokens, plain, build)
    expected = logits_of(bench.twin()[0], tokens, **states)
    assert differ(expected, plain)
    assert close(logits_of(model, tokens, **states), expected)
