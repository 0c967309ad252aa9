import types

import pytest
import torch
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import concatenated, per_head, separate, submodule
from hfpatch.sites.layouts import grouped_columns


def attention(**widths):
    module = nn.Module()
    for name, width in widths.items():
        module.add_module(name, nn.Linear(8, width))
    return module


def config(heads, kv_heads=None):
    return types.SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)


def indices(projections, total):
    return {target: p.columns.read(torch.arange(total)).tolist() for target, p in projections.items()}


def test_layouts():
    columns = separate(query="a", key="b", value="c")(attention(a=8, b=4, c=4), None)
    assert {target: (p.path, p.columns.size) for target, p in columns.items()} == {
        "query": ("a", 8),
        "key": ("b", 4),
        "value": ("c", 4),
    }
    columns = indices(concatenated("qkv")(attention(qkv=12), config(4, 1)), 12)  # head size 2
    assert columns == {"query": [0, 1, 2, 3, 4, 5, 6, 7], "key": [8, 9], "value": [10, 11]}
    columns = indices(per_head("qkv")(attention(qkv=12), config(2)), 12)
    assert columns == {"query": [0, 1, 6, 7], "key": [2, 3, 8, 9], "value": [4, 5, 10, 11]}
    columns = indices(grouped_columns(attention(qkv=16), config(4), "qkv", groups=2), 16)
    assert columns == {"query": [0, 1, 2, 3, 8, 9, 10, 11], "key": [4, 5, 12, 13], "value": [6, 7, 14, 15]}


@pytest.mark.parametrize(("layout", "heads"), [(concatenated("qkv"), (4, 3)), (per_head("qkv"), (3, 3))])
def test_a_layout_that_does_not_divide_the_columns_is_refused(layout, heads):
    with pytest.raises(HfpatchError, match=r"qkv: \d+ columns do not divide into \d+ equal parts"):
        layout(attention(qkv=16), config(*heads))


def test_submodule_names_the_step_that_is_missing():
    root = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    assert submodule(root, "", of="x") is root
    assert submodule(root, "0.0", of="x") is root[0][0]
    with pytest.raises(HfpatchError, match=r"x: Sequential has no module '1' \(declared path: '0\.1\.a'\)"):
        submodule(root, "0.1.a", of="x")
