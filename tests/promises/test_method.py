"""What `hfpatch.check` says of a method that breaks a promise."""

import itertools
import random
import re

import numpy as np
import pytest
import torch
from families import make_model
from own_methods import (
    by_torch,
    changing,
    defined,
    equal_layers,
    failing,
    forgotten,
    low_rank,
    on_the_cpu,
    with_an_idle_part,
)
from torch import nn

import hfpatch

NO_OP, NEW, CLEAN, DEVICE, GRADIENT, SAME, ROWS, REACHED, INIT = (
    "no-op at init", "each place keeps dtype and input", "each place leaves nothing behind",
    "each place works on any device", "each place has the right gradient", "equal results in every call",
    "rows of a batch are independent", "gradients reach exactly the added tensors", "init independent of the rest",
)  # fmt: skip


def change(parts, x):
    return parts["b"](parts["a"](x))


def parts_of(self, site, seed):
    return low_rank(site, seed, site.width("query"))


class Remembering(nn.Module):
    """Adds the mean of the call before."""

    last = 0.0

    def forward(self, x):
        out = x + self.last
        self.last = x.mean().item()
        return out


def building(do):
    """Return a build() that does something with the parts of each layer, or before there are any."""

    def build(self, site, seed):
        parts = parts_of(self, site, seed)
        do(parts, seed)
        return parts

    return build


def counting(self, parts, q, x, site):
    self.calls = getattr(self, "calls", 0) + 1
    return q + change(parts, x)


def averaging(self, parts, q, x, site):
    mean = parts["a"].mean
    mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
    return q + change(parts, x - mean)


COUNTS, MEMO = [], {}


def in_a_list(self, parts, q, x, site):
    COUNTS.append(x.mean().item())
    return q + change(parts, x)


def on_itself(self, parts, q, x, site):
    on_itself.last = x.mean()
    return q + change(parts, x)


def by_a_memo(self, parts, q, x, site):
    if x.device not in MEMO:
        MEMO[x.device] = x.new_ones(x.shape[-1])
    return q + change(parts, x * MEMO[x.device])


def over_heads(self, parts, a, x, site):
    heads = a.unflatten(-1, (site.head_count, -1)).transpose(-1, -2)
    return a + parts["mix"](heads).transpose(-1, -2).flatten(-2)


def in_the_data(self, parts, q, x, site):
    x.data.mul_(1 + parts["b"].weight.abs().sum())
    return q + change(parts, x)


def in_bf16(self, parts, q, x, site):
    down, up = (parts[name].weight.bfloat16() for name in "ab")
    return q + (x.bfloat16() @ down.T @ up.T).to(q.dtype)


def for_two_rows(self, parts, q, x, site):
    return q + change(parts, x.squeeze()) * x.squeeze().shape[0]


class Doubled(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


COUNTER = itertools.count()
WRONG = {
    "right": ({}, {}),
    "no no-op": ({"build": changing}, {NO_OP: r"difference \d.*; start from a no-op"}),
    "another dtype": (
        {"query": lambda self, parts, q, x, site: (q + change(parts, x)).double()},
        {NEW: "query returns torch.float64 where it was given torch.float32"},
    ),
    "fewer digits": ({"query": in_bf16}, {NEW: "query computes in torch.bfloat16 where it was given torch.float32"}),
    "in place": (
        {"query": lambda self, parts, q, x, site: q.add_(change(parts, x))},
        {NEW: "query changes its argument in place; return a new tensor"},
    ),
    "in the data": ({"query": in_the_data}, {NEW: "query changes its argument in place", GRADIENT: "query: the grad"}),
    "a tensor of the CPU": (
        {"query": on_the_cpu},
        {DEVICE: "query puts a tensor of the CPU beside its input; create it with device=x"},
    ),
    "a tensor that is not registered": (
        {"build": building(lambda parts, seed: setattr(parts["a"], "rows", [torch.ones(2)]))},
        {DEVICE: "a.rows holds a tensor that is not moved, trained or saved; make it a parameter or buffer"},
    ),
    "a count on the configuration": ({"query": counting}, {CLEAN: "query changes self.calls; a call keeps nothing"}),
    "a value on a part": (
        {
            "build": lambda self, site, seed: nn.ModuleDict({**parts_of(self, site, seed), "mean": Remembering()}),
            "query": lambda self, parts, q, x, site: q + change(parts, parts["mean"](x)),
        },
        {CLEAN: "query changes mean.last; a call keeps", SAME: r"differs by \d", GRADIENT: "query: the gradient for"},
    ),
    "a buffer that changes": (
        {
            "build": building(lambda parts, seed: parts["a"].register_buffer("mean", torch.zeros(32))),
            "query": averaging,
        },
        {CLEAN: "query changes a.mean; a call keeps", SAME: r"differs by \d", GRADIENT: "query: the gradient for"},
    ),
    "a number in a list of the module": ({"query": in_a_list}, {CLEAN: "query changes COUNTS; a call keeps nothing"}),
    "a tensor on a function": ({"query": on_itself}, {CLEAN: "query keeps a tensor alive after the forward pass"}),
    "a memo of the module": ({"query": by_a_memo}, {}),
    "noise": (
        {"query": lambda self, parts, q, x, site: q + change(parts, nn.functional.dropout(x, 0.1))},
        {CLEAN: "query changes torch's random state", SAME: r"differs by \d", GRADIENT: "", ROWS: ""},
    ),
    "another setting": (
        {"query": lambda self, parts, q, x, site: torch.set_grad_enabled(True) and q + change(parts, x)},
        {CLEAN: "query changes torch's grad mode"},
    ),
    "one row": ({"query": for_two_rows}, {ROWS: r"a row alone differs by \d"}),
    "a mean over rows": (
        {"query": lambda self, parts, q, x, site: q + change(parts, x - x.mean(0))},
        {ROWS: r"a row alone differs by \d"},
    ),
    "no gradient": ({"build": with_an_idle_part}, {REACHED: r"4 of 8 added .*; \S*mine_idle\S*bias and 3 more rec"}),
    "no gradient of x": (
        {"query": lambda self, parts, q, x, site: q + change(parts, x.detach())},
        {GRADIENT: r"query: the gradient for x is 0 where the result's derivative is -?\d"},
    ),
    "another gradient": (
        {"query": lambda self, parts, q, x, site: q + change(parts, Doubled.apply(x))},
        {GRADIENT: "query: the gradient for x is"},
    ),
    "equal layers": ({"build": equal_layers}, {INIT: "a.weight starts equal in every layer; draw by hfpatch"}),
    "equal seeds": (
        {"build": lambda self, site, seed: low_rank(site, 0, site.width("query"))},
        {INIT: "a.weight starts equal with every seed; draw with the seed that build"},
    ),
    "drawn by torch": ({"build": by_torch}, {INIT: r"build\(\) draws a.weight by a global generator, so values"}),
    "a buffer drawn by torch": (
        {"build": building(lambda parts, seed: parts["a"].register_buffer("r", torch.randn(3), persistent=False))},
        {INIT: r"build\(\) draws a.r by a global generator"},
    ),
    "values by a counter": (
        {"build": building(lambda parts, seed: nn.init.constant_(parts["a"].weight, next(COUNTER)))},
        {INIT: r"build\(\) gives a.weight other values at every call"},
    ),
    "seeds torch": (
        {"build": building(lambda parts, seed: torch.manual_seed(seed))},
        {CLEAN: r"build\(\) seeds torch's global generator"},
    ),
    "seeds numpy": (
        {"build": building(lambda parts, seed: np.random.seed(seed))},
        {CLEAN: r"build\(\) changes numpy's random state"},
    ),
    "draws by Python": (
        {"build": building(lambda parts, seed: random.random())}, {CLEAN: r"build\(\) changes Python's random state"},
    ),
    "a decision by a value": (
        {"query": lambda self, parts, q, x, site: q + change(parts, x) * (1 if x.sum() > 0 else 2)}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_broken_promise_is_named(what, only):
    only(NO_OP, NEW, CLEAN, DEVICE, GRADIENT, SAME, ROWS, REACHED, INIT)
    members, broken = WRONG[what]
    with forgotten():
        report = hfpatch.check(make_model("gpt2"), defined(**members)())
    measured = {verdict.promise: verdict.measured for verdict in report.verdicts if not verdict.holds}
    assert measured.keys() == broken.keys()
    for promise, message in broken.items():
        assert re.search(message, measured[promise]), measured[promise]


def test_trained_and_loaded_tensors_are_compared_with_the_same_flags(only):
    """torch multiplies by a matrix that requires a gradient in another order, as of this method's transposed heads."""
    only("save and load")

    def build(self, site, seed):
        mix = nn.Linear(site.head_count, site.head_count, bias=False)
        nn.init.zeros_(mix.weight)
        return nn.ModuleDict({"mix": mix})

    with forgotten():
        config = defined(build=build, query=None, mixed=over_heads)()
        (verdict,) = hfpatch.check(hfpatch.load_base("tinyworld/gpt2").model, config).verdicts
    assert verdict.holds, verdict.measured


def test_an_error_in_a_method_is_named_with_its_line(only):
    only(NO_OP)
    with forgotten():
        (verdict,) = hfpatch.check(make_model("gpt2"), defined(query=failing)()).verdicts
    assert re.fullmatch(r"RuntimeError: no such \(own_methods.py, line \d+\)", verdict.measured)
