import torch
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.sites import Columns


@st.composite
def columns(draw):
    width = draw(st.integers(1, 12))
    start = draw(st.integers(0, width - 1))
    return Columns(draw(st.integers(1, 5)), width, start, draw(st.integers(1, width - start)))


def chosen(c: Columns) -> list[int]:
    """The indices of the columns, one by one."""
    return [group * c.width + c.start + i for group in range(c.groups) for i in range(c.length)]


leading = st.lists(st.integers(1, 3), max_size=3)


@given(columns(), leading)
def test_read_takes_the_columns_in_order(c, shape):
    out = torch.randn(*shape, c.groups * c.width)
    assert torch.equal(c.read(out), out[..., chosen(c)])
    assert c.read(out).shape[-1] == c.size


@given(columns(), leading)
def test_write_replaces_the_columns_and_nothing_else(c, shape):
    out, value = torch.randn(*shape, c.groups * c.width), torch.randn(*shape, c.size)
    before = out.clone()
    expected = out.clone()
    expected[..., chosen(c)] = value
    assert torch.equal(c.write(out, value), expected)
    assert torch.equal(out, before)


@given(columns())
def test_gradients_pass_through_the_columns_read_and_the_columns_kept(c):
    out, value = torch.randn(c.groups * c.width, requires_grad=True), torch.randn(c.size, requires_grad=True)
    c.write(out, value).sum().backward()
    kept = torch.ones(c.groups * c.width)
    kept[chosen(c)] = 0
    assert torch.equal(value.grad, torch.ones(c.size))
    assert torch.equal(out.grad if out.grad is not None else torch.zeros_like(kept), kept)
