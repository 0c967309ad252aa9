from collections import namedtuple

import pytest
import torch
from families import make_model, make_tokens
from torch import nn

from hfpatch import PreProjectionConfig, patch
from hfpatch.tuners import hidden_state
from hfpatch.tuners.hidden_state import argument_names, hidden_argument, replace_first, replace_hidden

Named = namedtuple("Named", ["hidden", "cache"])
X, EQUAL, NEW, OTHER = torch.zeros(1), torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)


class Attention(nn.Module):
    def forward(self, hidden_states, residual=None, mask=None, value=None):
        return hidden_states


NAMES = argument_names(Attention())


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((X, X), {}, [NEW, X]),
        ((X, OTHER, None, X), {}, [NEW, OTHER, None, NEW]),
        ((X,), {"residual": X, "value": X}, [NEW, X, NEW]),
        ((), {"hidden_states": X, "residual": X, "mask": EQUAL}, [NEW, X, EQUAL]),
    ],
)
def test_every_argument_that_is_the_hidden_state_is_replaced_but_the_residual(args, kwargs, expected):
    new_args, new_kwargs = replace_hidden(NAMES, args, kwargs, NEW)
    assert hidden_argument(new_args, new_kwargs) is NEW
    assert new_kwargs.keys() == kwargs.keys()
    assert all(value is other for value, other in zip((*new_args, *new_kwargs.values()), expected, strict=True))


@pytest.mark.parametrize("output", [(X, OTHER), [X, OTHER], Named(X, OTHER), (X,)])
def test_replace_first_keeps_the_type_and_the_rest(output):
    changed = replace_first(output, lambda x: x + 1)
    assert type(changed) is type(output)
    assert torch.equal(changed[0], X + 1)
    assert all(a is b for a, b in zip(changed[1:], output[1:], strict=True))
    assert output[0] is X
    assert torch.equal(replace_first(X, lambda x: x + 1), X + 1)  # a bare tensor


def test_no_forward_reads_a_signature(monkeypatch):
    model = patch(make_model("gpt2"), PreProjectionConfig(content_skip=True))
    monkeypatch.setattr(hidden_state, "inspect", None)
    model(make_tokens())
