"""PEFT's features, for every method and LoRA; docs/reference/peft-features.md must have the same results."""

from importlib.metadata import version

import peft_catalogue
import pytest
from families import make_model, make_tokens
from own_methods import defined, forgotten, low_rank
from peft.tuners import tuners_utils
from torch import nn

import hfpatch
from hfpatch.promises import catalogue
from hfpatch.tuners import MethodLayer

PAGE = peft_catalogue.FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", peft_catalogue.MUST)
@pytest.mark.parametrize("case", peft_catalogue.CASES)
def test_every_method_does_what_lora_does(case, name):
    assert peft_catalogue.cell(case, name) == "yes"


LORA, LINEAR = "LoraConfig()", 'PreProjectionConfig(activation="identity")'
SMALL = [(case, tuple(peft_catalogue.FEATURES)) for case in (LORA, LINEAR, "ValueResidualConfig()")]
# An entry beside one feature is a pair of features already; beside two, which it is on two methods, a triple
ALONE_OR_ALL = [pair for pair in peft_catalogue.PAIRS if len(pair) != 2]
PAIRS = {case: peft_catalogue.PAIRS if case in (LORA, LINEAR) else ALONE_OR_ALL for case in peft_catalogue.CASES}
LARGE = [(case, pair) for case, pairs in PAIRS.items() for pair in pairs if (case, pair) not in SMALL]


@pytest.mark.parametrize(("case", "pair"), [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)])
def test_features_go_together(case, pair):
    """A method does beside other features what it does alone, and in this LoRA is wrong in two ways."""
    outcomes = {name: peft_catalogue.outcome(case, pair, name) for name in peft_catalogue.beside(pair)}
    expected = {name: peft_catalogue.cell(case, name).partition(":")[0] for name in outcomes}
    further = {"modules_to_save", "tokens"} & {*pair}
    if further and version("transformers") == "5.6.0":  # its load_adapter takes neither
        expected["save and load"] = "Broken: a loaded adapter computes something else"
    if case == LORA and "modules_to_save" in pair:
        expected["unload"] = "Broken: unloaded it computes otherwise"  # it keeps the trained copies
    if case == LORA and further:
        assert outcomes.pop("hot swap").startswith("KeyError")
        del expected["hot swap"]
    assert outcomes == expected


@pytest.mark.parametrize("case", peft_catalogue.CASES)
def test_the_page_says_what_is_refused(case):
    cells = [peft_catalogue.cell(case, name) for name in catalogue.REFUSABLE]
    assert f"| `{case}` | {' | '.join(cells)} |" in PAGE.splitlines()


def test_the_page_lists_what_is_tried_and_nothing_that_is_not():
    cells = dict.fromkeys(((c, n) for c in peft_catalogue.CASES for n in catalogue.CATALOGUE), "")
    assert peft_catalogue.tables(cells)[0] in PAGE
    assert sum(line.startswith("| `") for line in PAGE.splitlines()) >= len(peft_catalogue.CASES)


def in_a_sequence(self, site, seed):
    parts = low_rank(site, seed, site.width("query"))
    return nn.ModuleDict({"both": nn.Sequential(parts["a"], nn.Sequential(nn.SiLU(), parts["b"]))})


SEQUENCE = {"build": in_a_sequence, "query": lambda self, parts, q, x, site: q + parts["both"](x)}


@pytest.mark.parametrize("members", [{}, SEQUENCE], ids=["flat", "modules in modules"])
def test_a_method_of_ones_own_gets_it_unasked(members, only):
    only("PEFT's features")
    with forgotten():
        (verdict,) = hfpatch.check(make_model("llama"), defined(**members)()).verdicts
    assert (verdict.promise, verdict.holds) == ("PEFT's features", True)
    refused = [name for name in catalogue.REFUSABLE if name != "rows"]
    assert verdict.measured == f"13 of 18 on a tiny twin; refused, with the reason: {', '.join(refused)}"


delete, unmerge = MethodLayer.delete_adapter, MethodLayer.unmerge


def delete_all(self, adapter_name):
    for name in [*self.configs]:
        delete(self, name)


def unmerge_almost(self):
    unmerge(self)
    self.get_base_layer().weight.data *= 1 + 1e-6


FURTHER = (LINEAR, tuners_utils, "set_additional_trainable_modules", lambda **options: None, "is not trained")
BROKEN = {
    "modules_to_save": FURTHER,
    "tokens": FURTHER,
    "several adapters": (LINEAR, MethodLayer, "delete_adapter", delete_all, "deleting an adapter changes the other"),
    "merge": (LINEAR, MethodLayer, "unmerge", unmerge_almost, "unmerged its weights are others"),
    "unload": (LINEAR, MethodLayer, "unmerge", lambda self: None, "unloaded it computes otherwise"),
    "hot swap": (LORA, catalogue, "hotswap_adapter", lambda *given: None, "swapped it computes something else"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(name, monkeypatch):
    case, owner, function, broken, why = BROKEN[name]
    monkeypatch.setattr(owner, function, broken)
    with pytest.raises(catalogue.Broken, match=why):
        catalogue.kept(peft_catalogue.base(), peft_catalogue.CASES[case], name)


def test_a_refusal_where_none_may_be_is_a_broken_promise(monkeypatch):
    monkeypatch.setitem(catalogue.CATALOGUE, "unload", lambda base, config: "it is not possible")
    with pytest.raises(catalogue.Broken, match="it is not possible"):
        catalogue.kept(peft_catalogue.base(), hfpatch.PreProjectionConfig(), "unload")


@pytest.mark.parametrize(
    ("lora_too", "expected"),
    [
        (True, (True, "0 of 1 on a tiny twin; refused, with the reason: unload (as for a LoRA on this model)")),
        (False, (False, "unload: KeyError: 'of the model'")),
    ],
)
def test_what_a_lora_cannot_do_on_a_model_either_does_not_apply(monkeypatch, lora_too, expected):
    def fails(base, config):
        if lora_too or config.peft_type != "LORA":
            raise KeyError("of the model")

    monkeypatch.setattr(catalogue, "CATALOGUE", {"unload": fails})
    inputs = {"input_ids": make_tokens()}
    assert catalogue.peft_calls(make_model("llama"), hfpatch.PreProjectionConfig(), inputs) == expected
