"""Exports of methods that others wrote, in all that a class and its module may be made of."""

import sys

import elsewhere
import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb
from own_methods import forgotten
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch import HfpatchError
from hfpatch.export.write import write_model
from hfpatch.support import generated

HELPERS = """
import torch.nn.functional

def squash(x, slope):
    return slope * torch.nn.functional.softsign(x)
"""
HEAD = """
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable, ClassVar, Literal

import numpy.linalg, math as maths
import torch
from torch import nn

import hfpatch
from hfpatch import HfpatchError
from hfpatch.nn import normal_ as draw
from their_helpers import squash as squashed
if TYPE_CHECKING:
    from hfpatch import MethodSite

SLOPES = {}
SLOPES["gentle"] = 0.5
SLOPES.update(steep=1.0 + 0 * maths.pi)
COUNT = 1
COUNT += 1
"""
METHOD = """
@hfpatch.method("theirs")
@dataclass
class Theirs(hfpatch.MethodConfig):
    sizes: tuple[int, ...] = (2, 3)
    kind: Literal["gentle", "steep"] = "steep"
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    marks: set[str] = field(default_factory=lambda: {"x", "y"})
    limit: float | None = None

    GAIN: ClassVar[float] = 0.5
    HALF = GAIN
    SCALES: ClassVar[dict[str, float]] = {}
    SCALES.update(half=HALF)

    class Order(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.register_buffer("order", torch.arange(size).flip(0), persistent=False)

        def forward(self, x):
            return x[..., self.order]

    def __post_init__(self):
        super().__post_init__()
        if not self.sizes:
            raise HfpatchError("sizes must not be empty")
        self.total = sum(self.sizes)

    def build(self, site, seed):
        parts = nn.ModuleDict({"order": Theirs.Order(site.hidden_size)})
        for target, name in zip(("key", "value"), self.names):
            down, up = nn.Linear(site.hidden_size, self.total), nn.Linear(self.total, site.width(target), bias=False)
            draw(down.weight, std=0.1, seed=seed, name=f"{site.name}.{target}.down")
            nn.init.zeros_(down.bias)
            nn.init.zeros_(up.weight)
            parts[f"{target}_{name}"] = nn.Sequential(down, nn.Sequential(nn.SiLU()), up)
        return parts

    def added(self, y, part, x, site: "MethodSite"):
        norm = float(numpy.linalg.norm([3.0, 4.0])) / 5
        assert isinstance(self.sizes, tuple) and isinstance(self.names, list) and COUNT == 2
        assert self.marks == {"x", "y"}
        return y + self.SCALES["half"] * Theirs.GAIN * norm * squashed(part, SLOPES[self.kind])

    def key(self, parts, k, x, site):
        return self.added(k, parts["key_a"](parts["order"](x)), x, site)

    def value(self, parts, v, x, site):
        return self.added(v, parts["value_b"](x), x, site)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Write a module and its neighbour where Python finds them, and return the class of the method."""

    def write(text=HEAD + METHOD):
        (tmp_path / "their_helpers.py").write_text(HELPERS)
        (tmp_path / "their_module.py").write_text(text)
        return __import__("their_module").Theirs

    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten():
        yield write
    for name in ("their_module", "their_helpers"):
        sys.modules.pop(name, None)
    for cached in (generated._read, generated._folder):
        cached.cache_clear()


def patched(method, model=None):
    model = hfpatch.patch(model or make_model("llama"), method())
    perturb(model, std=0.2)
    return model


@pytest.mark.slow
def test_all_that_a_method_uses_is_in_its_export(theirs, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).eval()
    model, tokens = patched(theirs(), base), make_tokens()
    (tmp_path / "export").mkdir()
    write_model(model, tmp_path / "export")
    source = (tmp_path / "export" / "modeling_hfpatch.py").read_text()
    assert "their_helpers import" not in source
    computed, dtypes = elsewhere.computed(tmp_path / "export", tokens)
    assert torch.equal(computed["logits"], logits_of(model, tokens))
    assert {kind for name, kind in dtypes.items() if "theirs" in name} == {"torch.float32"}


def test_a_method_is_put_on_an_export_that_has_it(tmp_path):
    model, tokens = patched(hfpatch.OutputGateConfig), make_tokens()
    write_model(model, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert torch.equal(logits_of(hfpatch.patch(exported, hfpatch.OutputGateConfig()), tokens), logits_of(model, tokens))


REFUSED = {
    "a linear layer of another kind": (
        "nn.Sequential(nn.SiLU())",
        "nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(self.total, self.total)))",
        "Theirs cannot be exported: key_a.1.0 is a ParametrizedLinear, an nn.Linear that computes or holds something",
    ),
    "a linear layer with a buffer": (
        "nn.init.zeros_(up.weight)",
        "nn.init.zeros_(up.weight); up.register_buffer('seen', torch.ones(1), persistent=False)",
        "Theirs cannot be exported: key_a.2 is a Linear, an nn.Linear that computes or holds something else; make it",
    ),
    "a neighbour as a whole": ("squashed(part", "their_helpers.squash(part", "uses their_helpers as a whole; import"),
    "a module of hfpatch": ("draw(down", "hfpatch.nn.normal_(down", "uses hfpatch as a whole; import its members"),
    "a part of hfpatch": ("draw(down", "theirs_nn.normal_(down", "uses hfpatch.nn as a whole; import its members"),
    "a name from a block": ("norm = float(", "norm = number(", "their_module defines number inside another statement"),
    "a table from a loop": ("norm = float(", "norm = TABLE['on'] * float(", "their_module fills TABLE inside another"),
    "a name of the file": ("Theirs", "Hooked", "defines Hooked, too; rename the method's class"),
    "a helper's name of the file": ("Order(nn.Module)", "Order(Matrix)", "Matrix means something else in another modu"),
    "what fails without hfpatch": ("* Theirs.GAIN", "* bool(self.spec.name) * Theirs.GAIN", "fails with Attrib"),
}
MORE = """
import their_helpers
from hfpatch import nn as theirs_nn
try:
    number = float
except NameError:
    raise
TABLE = {}
for word in ("on", "off"):
    TABLE[word] = len(word) - 1
class Matrix(nn.Module):
    pass
"""


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_copied_is_one_line(theirs, tmp_path, what):
    old, new, message = REFUSED[what]
    text = METHOD.replace(old, new) + "\nTheirs = Hooked\n" * (new == "Hooked")
    model = patched(theirs(HEAD + MORE + text))
    with pytest.raises(HfpatchError, match=message) as error:
        write_model(model, tmp_path)
    assert "nothing was written" in str(error.value) or "make it an nn.Module" in str(error.value)
