"""Hearing what a model's query paths compute: once each, what the model itself computes, and no hook stays."""

import pytest
import torch
from families import make_tokens
from models.test_build import build

from hfpatch.models.paths import observed, query_paths_with_f


def heard_in(model, tokens):
    heard = []
    with torch.no_grad(), observed(model, heard.append):
        model(tokens)
    return heard


@pytest.mark.parametrize("anchor", ["identity", "weight"])
@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "llama"])
def test_x_f_and_anchor_make_the_query(case, anchor):
    model, tokens, queries = build(case, anchor=anchor), make_tokens(), []
    paths = [owner.path for owner in query_paths_with_f(model)]
    handles = [path.register_forward_hook(lambda _, args, output: queries.append((args[0], output))) for path in paths]
    heard = heard_in(model, tokens)
    assert [record.at.split(".")[2] for record in heard] == ["0", "1"]
    assert len(queries) == len(heard)
    for record, (x, query) in zip(heard, queries, strict=True):
        assert record.target == "query"
        assert torch.equal(record.x, x)
        assert torch.equal((record.anchor + record.f) / 2, query)
        assert torch.equal(record.anchor, x) is (anchor == "identity")
    for handle in handles:
        handle.remove()
    assert not any(module._forward_hooks for module in model.modules())


def test_fused_or_not_it_hears_the_same():
    apart, fused = (heard_in(build("gpt2", fused=fused), make_tokens()) for fused in (False, True))
    torch.testing.assert_close([one.f for one in apart], [other.f for other in fused], rtol=1e-4, atol=1e-5)


def test_every_forward_pass_is_told_and_errors_leave_no_hook():
    model, heard = build("gpt2", path="residual"), []
    with torch.no_grad(), observed(model, heard.append):
        model(make_tokens())
        model(make_tokens()[:, :3])
    assert [record.f.shape[1] for record in heard] == [9, 9, 3, 3]
    with pytest.raises(ZeroDivisionError), observed(model, lambda _: 1 / 0):
        model(make_tokens())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("path", ["linear", "identity"])
def test_where_there_is_no_f_there_is_nothing_to_hear(path):
    model = build("gpt2", path=path)
    assert query_paths_with_f(model) == heard_in(model, make_tokens()) == []
