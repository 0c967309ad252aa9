"""What heads attend to, against the attention weights of each document alone, by the formulas."""

import math

import pytest
import torch
from families import CASES, make_model, make_tokens, perturb

from hfpatch import HfpatchError, PreProjectionConfig, find_sites, patch
from hfpatch.analysis.attention import head_attention
from hfpatch.analysis.text import batches_of

ROWS = [[5, 9, 11, 7, 3], [8, 4, 30], [12, 13, 14, 15, 16, 17, 18], [20, 21]]


def one_by_one(model, rows):
    """Sink, entropy and distance of each layer and head, from the weights of one document at a time."""
    model.set_attn_implementation("eager")
    by_head = {}
    for row in rows:
        with torch.no_grad():
            layers = model(torch.tensor([row]), output_attentions=True).attentions
        for layer, weights in enumerate(layers):
            for head, matrix in enumerate(weights[0].double().tolist()):
                for i in range(1, len(row)):
                    visible = matrix[i][: i + 1]
                    entropy = -sum(weight * math.log(weight) for weight in visible)
                    back = sum(weight * (i - j) for j, weight in enumerate(visible))
                    by_head.setdefault((layer, head), []).append((visible[0], entropy, back))
    return {key: torch.tensor(rows).mean(0).tolist() for key, rows in by_head.items()}


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "gemma2", "qwen3", "falcon_per_head", "opt", "bloom", "phi3"])
@pytest.mark.parametrize("patched", [False, True])
def test_numbers_are_those_of_each_document_alone(case, patched):
    model = make_model(case)
    if patched:
        patch(model, PreProjectionConfig())
        perturb(model)
    before = model.config._attn_implementation
    by_head = {(head.layer, head.head): head for head in head_attention(model, batches_of(ROWS, size=3))}
    assert model.config._attn_implementation == before
    assert not any(site.attention._forward_hooks and not patched for site in find_sites(model))
    expected = one_by_one(model, ROWS)
    assert by_head.keys() == expected.keys()
    for key, numbers in expected.items():
        head = by_head[key]
        assert [head.sink, head.entropy, head.distance] == pytest.approx(numbers, abs=2e-5), key


def test_packed_documents_are_counted_apart():
    model = make_model("llama")
    packed = torch.tensor([[token for row in ROWS[:3] for token in row]])
    positions = torch.tensor([[position for row in ROWS[:3] for position in range(len(row))]])
    (first, *_) = head_attention(model, [{"input_ids": packed, "position_ids": positions}])
    assert [first.sink, first.entropy, first.distance] == pytest.approx(one_by_one(model, ROWS[:3])[0, 0], abs=2e-5)


def test_every_family_tells_its_weights():
    for case in CASES:
        heads = head_attention(make_model(case), [{"input_ids": make_tokens(2, 9)}])
        assert {head.layer for head in heads} == {0, 1}, case
        assert all(0 <= head.sink <= 1 and 0 <= head.entropy <= math.log(9) for head in heads), case


def test_a_module_that_keeps_its_weights_is_named_and_nothing_stays():
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: (forward(*args, **kwargs)[0], None)
    before = model.config._attn_implementation
    with pytest.raises(HfpatchError, match="layer 1: LlamaAttention does not return its attention weights"):
        head_attention(model, [{"input_ids": make_tokens(1, 5)}])
    assert model.config._attn_implementation == before
    assert not attention._forward_hooks
