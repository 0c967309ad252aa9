"""What `hfpatch.check` says of a method that breaks a promise."""

import re

import pytest
from families import make_model
from own_methods import by_torch, changing, defined, equal_layers, failing, forgotten, on_the_cpu, with_an_idle_part

import hfpatch
from hfpatch.promises import run

OF_METHODS = {
    "no-op at init", "each place keeps dtype and input", "each place works on any device",
    "gradients reach exactly the added tensors", "init independent of the rest",
}  # fmt: skip


WRONG = {
    "right": ({}, {}),
    "no no-op": ({"build": changing}, {"no-op at init": r"difference \d.*; start from a no-op"}),
    "another dtype": (
        {"query": lambda self, parts, q, x, site: (q + parts["b"](parts["a"](x))).double()},
        {"each place keeps dtype and input": "query returns torch.float64 where it was given torch.float32"},
    ),
    "in place": (
        {"query": lambda self, parts, q, x, site: q.add_(parts["b"](parts["a"](x)))},
        {"each place keeps dtype and input": "query changes its argument in place; return a new tensor"},
    ),
    "equal layers": (
        {"build": equal_layers},
        {"init independent of the rest": "a.weight starts equal in every layer; draw by hfpatch.nn.normal_"},
    ),
    "a tensor of the CPU": (
        {"query": on_the_cpu},
        {"each place works on any device": "query puts a tensor of the CPU beside its input; create it with device=x"},
    ),
    "drawn by torch": (
        {"build": by_torch},
        {"init independent of the rest": r"build\(\) draws a.weight by torch's global generator, so values depend"},
    ),
    "no gradient": (
        {"build": with_an_idle_part},
        {"gradients reach exactly the added tensors": r"4 of 8 added .*; \S*mine_idle\S*bias and 3 more received"},
    ),
    "a decision by a value": (
        {"query": lambda self, parts, q, x, site: q + parts["b"](parts["a"](x)) * (1 if x.sum() > 0 else 2)}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_broken_promise_is_named(what, monkeypatch):
    monkeypatch.setattr(run, "PROMISES", [entry for entry in run.PROMISES if entry[0] in OF_METHODS])
    members, broken = WRONG[what]
    with forgotten():
        report = hfpatch.check(make_model("gpt2"), defined(**members)())
    measured = {verdict.promise: verdict.measured for verdict in report.verdicts if not verdict.holds}
    assert measured.keys() == broken.keys()
    for promise, message in broken.items():
        assert re.search(message, measured[promise]), measured[promise]


def test_an_error_in_a_method_is_named_with_its_line(monkeypatch):
    monkeypatch.setattr(run, "PROMISES", run.PROMISES[:1])
    with forgotten():
        (verdict,) = hfpatch.check(make_model("gpt2"), defined(query=failing)()).verdicts
    assert re.fullmatch(r"RuntimeError: no such \(own_methods.py, line \d+\)", verdict.measured)
