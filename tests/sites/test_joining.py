"""Where the branch joins the residual stream, and what the projections read, in the source of made-up blocks."""

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic

from hfpatch.sites.joining import Unclear, follow_branch, follow_inputs


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, hidden_states, other=None):
        query = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], 2, 2)
        return self.o_proj(query.flatten(-2)), None


class WithResidual(Attention):
    def forward(self, hidden_states):
        return self.norm(hidden_states + self.o_proj(self.q_proj(hidden_states)))


class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.dropout, self.norm = nn.Linear(4, 4), nn.Dropout(0.1), nn.LayerNorm(4)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.norm(hidden_states + input_tensor)


class Block(nn.Module):
    windows = 0

    def __init__(self, attention=Attention):
        super().__init__()
        self.attention, self.output, self.norm, self.mlp = attention(), Output(), nn.LayerNorm(4), nn.Linear(4, 4)
        self.gain, self.drop_path = nn.Parameter(torch.ones(4)), nn.Identity()


class Sandwich(Block):
    def forward(self, x):
        residual = x
        x = self.attention(x)[0]
        x = self.norm(x)
        x += residual
        return x


class InAnotherModule(Block):
    def forward(self, x):
        outputs = self.attention(x)
        attended = self.output(outputs[0], x)
        return (attended,) + outputs[1:]  # noqa: RUF005 as BERT has it


class Elementwise(Block):
    def forward(self, x):
        return x + self.gain * self.attention(x)[0]


class InWindows(Block):
    def forward(self, x):
        attended = self.attention(x.view(-1, 2, 4))[0].view(x.shape)
        return x + self.drop_path(attended)


class BySwitch(Block):
    def forward(self, x, windows=None):
        attended = self.attention(x)[0]
        if self.windows > 0:
            attended = attended.view(-1)
        if windows is not None:
            x = self.mlp(x)
        return self.add(x, attended)

    def add(self, stream, branch):
        return torch.add(stream, branch)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, residual, branch):
        beta = self.weight.sigmoid()
        return (1 - beta) * residual + beta * branch


class Gated(Block):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        return self.gate(x, self.attention(x)[0])


class Inside(Block):
    def forward(self, x):
        return self.mlp(self.attention(x))


class Lost(Block):
    def forward(self, x):
        return self.mlp(self.attention(x)[0])


@pytest.mark.parametrize(
    ("block", "end", "changed"),
    [
        (Sandwich(), "norm", ""),
        (InAnotherModule(), "output.dense", ""),
        (Elementwise(), "attention", "self.gain multiplies it"),
        (InWindows(), "attention", "view() rearranges it"),
        (BySwitch(), "attention", ""),
        (Gated(), "attention", "beta multiplies it"),
        (Inside(WithResidual), "attention.o_proj", ""),
        (quantize_dynamic(InAnotherModule(), {nn.Linear}), "output.dense", ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_the_end_of_the_branch(block, end, changed):
    """Factors and plain sums are read in the models of tests/architectures/others.py."""
    branch = follow_branch(block, "attention", "attention.o_proj")
    assert (branch.end, branch.factor, branch.changed) == (end, 1, changed)


def test_a_switch_of_the_block_decides():
    block = BySwitch()
    block.windows = 2
    assert follow_branch(block, "attention", "attention.o_proj").changed == "view() rearranges it"


def test_a_branch_that_joins_nothing_is_unclear():
    with pytest.raises(Unclear, match="does not show where the branch joins"):
        follow_branch(Lost(), "attention", "attention.o_proj")


class Positional(Attention):
    def forward(self, hidden_states, positions):
        return self.o_proj(self.q_proj(hidden_states + positions))


class Normed(Attention):
    def forward(self, hidden_states):
        return self.o_proj(self.q_proj(self.norm(hidden_states)))


class OfAnother(Attention):
    def forward(self, hidden_states, states):
        return self.o_proj(self.q_proj(states))


class CrossToo(Attention):
    def forward(self, hidden_states, states=None):
        if states is not None:  # noqa: SIM108
            query = self.q_proj(states)
        else:
            query = self.q_proj(hidden_states)
        return self.o_proj(query)


class NotCalled(Attention):
    def forward(self, hidden_states):
        return nn.functional.linear(hidden_states, self.q_proj.weight)


def only(attention):
    (read,) = follow_inputs(attention, "q_proj")
    return read


def test_what_projections_read():
    read = only(Attention())
    assert (read.end, read.added) == ("", "")
    assert only(Positional()).added == "positions"
    assert only(Normed()).end == "norm"
    assert only(OfAnother()) is None
    assert only(CrossToo()).end == ""
    assert [read.end for read in follow_inputs(CrossToo(), "q_proj", "o_proj")] == ["", "q_proj"]
    with pytest.raises(Unclear, match=r"NotCalled\.forward does not call q_proj"):
        only(NotCalled())
