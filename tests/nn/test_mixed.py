"""A projection put together from paths and a smaller matrix, against placing column by column."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.nn import IdentityAnchoredQuery, MixedProjection, WeightAnchoredQuery
from hfpatch.nn.calls import CALLS, SharedLinear


class Constant(nn.Module):
    """Gives column i of the path the value ``start + i``."""

    def __init__(self, start: int, size: int) -> None:
        super().__init__()
        self.values = start + torch.arange(size, dtype=torch.float32)

    def forward(self, x):
        return self.values.expand(*x.shape[:-1], -1)


@settings(max_examples=60, deadline=None)
@given(groups=st.integers(1, 4), gaps=st.lists(st.integers(0, 3), min_size=3, max_size=3), data=st.data())
def test_every_column_comes_from_where_it_belongs(groups, gaps, data):
    lengths = [data.draw(st.integers(1, 3)) for _ in range(2)]
    starts = [gaps[0], gaps[0] + lengths[0] + gaps[1]]
    width = starts[1] + lengths[1] + gaps[2]
    spans = {name: (s, n) for name, s, n in zip("ba", starts, lengths, strict=True)}
    paths = {name: Constant(1000 * (i + 1), groups * spans[name][1]) for i, name in enumerate("ba")}
    mixed = MixedProjection(inputs=2, groups=groups, width=width, paths=paths, spans=spans)
    if mixed.rest is not None:
        nn.init.zeros_(mixed.rest.weight)
        mixed.rest.bias = nn.Parameter(-1.0 - torch.arange(mixed.rest.out_features))
    expected, used = [], {"b": 0, "a": 0, "rest": 0}
    for _ in range(groups):
        for column in range(width):
            owner = next((n for n, (s, length) in spans.items() if s <= column < s + length), "rest")
            base = {"b": 1000, "a": 2000, "rest": None}[owner]
            expected.append(-1.0 - used[owner] if base is None else base + used[owner])
            used[owner] += 1
    y = mixed(torch.zeros(2, 3, 2))
    assert torch.equal(y, torch.tensor(expected, dtype=torch.float32).expand(2, 3, -1))
    assert mixed(torch.zeros(0, 3, 2)).shape == (0, *y.shape[1:])


def test_the_linear_part_is_what_is_left_without_f():
    sizes, mixed = {"hidden_size": 4, "out_features": 4}, {}
    for name, path in {
        "none": IdentityAnchoredQuery(**sizes, f="none"),
        "linear": IdentityAnchoredQuery(**sizes, f="linear"),
        "nonlinear": IdentityAnchoredQuery(**sizes),
        "weight": WeightAnchoredQuery(**sizes, bias=True),
    }.items():
        layout = {"inputs": 4, "groups": 2, "width": 5, "spans": {"query": (1, 2)}, "bias": True}
        mixed[name] = MixedProjection(paths={"query": path}, **layout)
        matrix, bias = mixed[name].linear_part()
        grouped = matrix.view(4, 2, 5)
        query, rest = grouped[..., 1:3].reshape(4, 4), grouped[..., [0, 3, 4]].reshape(4, 6)
        expected = {
            "none": lambda path: torch.eye(4),
            "linear": lambda path: torch.eye(4) + path.f.weight.T,
            "nonlinear": lambda path: torch.eye(4) / 2,
            "weight": lambda path: path.anchor.weight.T / 2,
        }[name](path)
        torch.testing.assert_close(query, expected)
        torch.testing.assert_close(rest, mixed[name].rest.weight.T)
        torch.testing.assert_close(bias.view(2, 5)[:, [0, 3, 4]].flatten(), mixed[name].rest.bias)
        query_bias = path.anchor.bias / 2 if name == "weight" else torch.zeros(4)
        torch.testing.assert_close(bias.view(2, 5)[:, 1:3].flatten(), query_bias)


def test_a_shared_product_serves_the_same_x_once():
    layer = SharedLinear(4, 3)
    x, kept = torch.randn(2, 4), torch.randn(2, 3)
    CALLS.keep(layer, "product", (x, kept))
    assert layer(x) is kept
    assert torch.equal(layer(x), x @ layer.weight.T + layer.bias)
    CALLS.keep(layer, "product", (x, kept))
    other = x.clone()
    torch.testing.assert_close(layer(other), other @ layer.weight.T + layer.bias)
    assert torch.equal(layer(x), x @ layer.weight.T + layer.bias)
    assert layer not in CALLS.values


def test_joining_with_a_layernorm_or_without_a_matrix_is_refused():
    sizes = {"hidden_size": 4, "out_features": 4}
    layout = {"inputs": 4, "groups": 1, "spans": {"query": (0, 4)}, "fused": True}
    normed = IdentityAnchoredQuery(**sizes, input_norm="layernorm")
    with pytest.raises(HfpatchError, match="LayerNorm does not"):
        MixedProjection(width=12, paths={"query": normed}, **layout)
    with pytest.raises(HfpatchError, match="its own W_1"):
        MixedProjection(width=12, paths={"query": IdentityAnchoredQuery(**sizes, f="none")}, **layout)
    with pytest.raises(HfpatchError, match="there are none"):
        MixedProjection(width=4, paths={"query": IdentityAnchoredQuery(**sizes)}, **layout)


def test_a_weight_anchor_is_its_formula():
    path = WeightAnchoredQuery(hidden_size=4, out_features=6, bias=True)
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = (x @ path.anchor.weight.T + path.anchor.bias + path.f(x)) / 2
        torch.testing.assert_close(path(x), expected)
