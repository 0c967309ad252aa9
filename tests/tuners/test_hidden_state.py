import inspect
from collections import namedtuple

import pytest
import torch
from torch import nn

from hfpatch.tuners.hidden_state import hidden_argument, replace_first, replace_hidden

Named = namedtuple("Named", ["hidden", "cache"])
X, NEW, OTHER = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)


class Attention(nn.Module):
    def forward(self, hidden_states, residual=None, mask=None, value=None):
        return hidden_states


@pytest.mark.parametrize(("args", "kwargs"), [((X,), {}), ((), {"hidden_states": X}), ((X, OTHER), {"mask": None})])
def test_hidden_argument(args, kwargs):
    assert hidden_argument(args, kwargs) is X


def test_replace_by_position_by_keyword_and_everywhere():
    assert replace_hidden(Attention(), (X, OTHER), {"mask": None}, NEW) == ((NEW, OTHER), {"mask": None})
    assert replace_hidden(Attention(), (), {"hidden_states": X, "mask": OTHER}, NEW) == (
        (),
        {"hidden_states": NEW, "mask": OTHER},
    )
    args, kwargs = replace_hidden(Attention(), (X, OTHER, None), {"value": X}, NEW)
    assert args[0] is NEW
    assert args[1] is OTHER
    assert kwargs["value"] is NEW
    twin = X.clone()
    args, _ = replace_hidden(Attention(), (X, None, twin), {}, NEW)
    assert args[2] is twin


@pytest.mark.parametrize(
    ("args", "kwargs"), [((X, X), {}), ((X,), {"residual": X}), ((), {"hidden_states": X, "residual": X})]
)
def test_the_residual_stays_even_where_it_is_the_hidden_state(args, kwargs):
    new_args, new_kwargs = replace_hidden(Attention(), args, kwargs, NEW)
    assert hidden_argument(new_args, new_kwargs) is NEW
    assert (new_kwargs["residual"] if "residual" in kwargs else new_args[1]) is X


@pytest.mark.parametrize("output", [(X, OTHER), [X, OTHER], Named(X, OTHER), (X,)])
def test_replace_first_keeps_the_type_and_the_rest(output):
    changed = replace_first(output, lambda x: x + 1)
    assert type(changed) is type(output)
    assert torch.equal(changed[0], X + 1)
    assert all(a is b for a, b in zip(changed[1:], output[1:], strict=True))
    assert output[0] is X
    assert torch.equal(replace_first(X, lambda x: x + 1), X + 1)  # a bare tensor


def test_a_signature_is_read_once(monkeypatch):
    read, stock = [], inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda forward: read.append(forward) or stock(forward))

    class Other(nn.Module):
        def forward(self, hidden_states):
            return hidden_states

    for module in (Other(), Other()):
        assert replace_hidden(module, (X,), {}, NEW) == ((NEW,), {})
    assert read == [Other.forward]
