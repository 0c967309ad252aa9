"""What a method must be: each mistake of whoever writes one is one line that says what to write instead."""

import copy
import dataclasses
import pickle
import re
import sys
import types
from typing import Literal, Optional

import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb
from own_methods import defined, forgotten
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch import HfpatchError, patch
from hfpatch.export.write import write_model
from hfpatch.recipes.sizes import NO_SIZE, SIZES
from hfpatch.surgery.methods import validate_methods
from hfpatch.tuners.options import fitting


@pytest.fixture(autouse=True)
def _forgotten():
    with forgotten():
        yield


AT_DEFINITION = {
    "a name with capitals": ({"method": "Mine"}, "lowercase letters, digits"),
    "a name of PEFT": ({"method": "lora"}, "method 'lora' is peft.tuners.lora.config.LoraConfig already; choose"),
    "a name of hfpatch": ({"method": "output_gate"}, "hfpatch.methods.output_gate.OutputGateConfig already"),
    "a name of another's layer": ({"method": "scale"}, "method 'scale': its layer would be called 'hfpatch_scale', as"),
    "no place": ({"query": None}, "acts nowhere: define one of entered, query"),
    "an option that is a place": ({"annotations": {"mixed": bool}, "mixed": False}, "called 'mixed', which is a place"),
    "an option that is a function": ({"annotations": {"acts_at": bool}, "acts_at": False}, "'acts_at', which means"),
    "an option that is not loaded": (
        {"annotations": {"inner": int}, "inner": dataclasses.field(init=False, default=3)},
        "'inner' is a field with init=False",
    ),
    "an InitVar": ({"annotations": {"inner": dataclasses.InitVar[int]}, "inner": 3}, "'inner' is an InitVar"),
    "a misspelt place": (
        {"valeu": lambda self, parts, v, x, site: v},
        r"valeu is not a place.* \(did you mean 'value'\?\)",
    ),
    "an option of PEFT": ({"annotations": {"revision": str}, "revision": "a"}, "'revision', which means something"),
    "an option that is a key": ({"annotations": {"match": str}, "match": "a"}, "'match', which is a key of a recipe's"),
    "a dict": ({"annotations": {"a": dict}, "a": None}, "option 'a' is of type dict; use int, float, bool, str, None"),
    "a nested list": ({"annotations": {"a": list[list[int]]}, "a": 1}, r"option 'a' is of type list\[list\[int\]\]"),
    "a pair": ({"annotations": {"a": tuple[int, int]}, "a": (1, 2)}, r"type tuple\[int, int\]; use .* tuple\[..."),
    "a module": ({"annotations": {"a": nn.Module | None}, "a": None}, "option 'a' is of type torch.*Module; use int"),
    "an unknown type": ({"annotations": {"a": "Missing"}, "a": 1}, "must be known in its module: name 'Missing'"),
    "too few arguments": ({"query": lambda self, parts, q: q}, r"query\(self, parts, q\) must take \(self, parts, q"),
    "a place that is no function": ({"key": 3}, r"key must be a function, key\(self, parts, k, x, site\)"),
    "an own start": ({"__post_init__": lambda self: None}, r"__post_init__ must call super\(\).__post_init__\(\)"),
    "no dataclass": ({"base": object, "annotations": {}}, "is no dataclass below hfpatch.MethodConfig"),
}


@pytest.mark.parametrize("what", AT_DEFINITION)
def test_a_mistake_in_the_class(what):
    made, message = AT_DEFINITION[what]
    with pytest.raises(HfpatchError, match=message):
        defined(**made)


def of(parts):
    return lambda self, site, seed: parts


def failing(self, site, seed):
    raise LookupError("a\nproblem")


def on_meta(self, parts, q, x, site):
    return q.to("meta")


AT_INJECTION = {
    "a dict": ({"build": of({"a": nn.Linear(2, 2)})}, r"mine: build\(\) must return an nn.ModuleDict .*, not dict"),
    "nothing": ({"build": of(None)}, r"build\(\) must return an nn.ModuleDict with parameters, not NoneType"),
    "no parameters": ({"build": of(nn.ModuleDict({"a": nn.ReLU()}))}, r"with parameters; \['a'\] have none"),
    "an error": ({"build": failing}, r"mine: build\(\) failed at layer 0: LookupError: a problem"),
    "a part's name": (
        {"method": "part", "build": lambda self, site, seed: nn.ModuleDict({"names": nn.Linear(2, 2)})},
        "part: a part cannot be called 'names', as 'part_names' means something",
    ),
    "an iterator": ({"acts_at": lambda self: iter(["query"])}, r"must return some of \('query',\), not <list_iterator"),
    "a frozen parameter": (
        {"build": lambda self, site, seed: nn.ModuleDict({"a": nn.Linear(2, 2).requires_grad_(False)})},
        r"mine: build\(\): a.weight requires no gradient, but PEFT trains every one; use a buffer",
    ),
    "a value on meta": (
        {"build": lambda self, site, seed: nn.ModuleDict({"a": nn.Linear(2, int(torch.ones(()).item()))})},
        r"mine: build\(\) reads the value of a tensor: RuntimeError: .*; it is called on the meta device first",
    ),
    "a place without function": ({"acts_at": lambda self: ("key",)}, r"some of \('query',\), not \('key',\)"),
    "text": ({"acts_at": lambda self: "query"}, r"acts_at\(\) must return some of \('query',\), not 'query'"),
    "names of the base": ({"method": "c"}, "its tensors begin with 'c_', which the model's .*c_attn.* contains; give"),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("what", AT_INJECTION)
def test_a_mistake_that_shows_at_injection_leaves_the_model_as_it_was(what, wrapped):
    made, message = AT_INJECTION[what]
    model, config = make_model("gpt2"), defined(**made)()
    names = list(model.state_dict())
    with pytest.raises(HfpatchError, match=message):
        get_peft_model(model, config) if wrapped else patch(model, config)
    assert list(model.state_dict()) == names


RETURNED = {
    "nothing": (lambda self, parts, q, x, site: None, r"Mine.query must return a tensor, not NoneType; does it lack a"),
    "a pair": (lambda self, parts, q, x, site: (q, x), r"Mine.query must return a tensor, not tuple$"),
    "another shape": (lambda self, parts, q, x, site: q[..., :1], r"Mine.query returned \(2, 9, 1\) .* \(2, 9, 32\)"),
    "another device": (on_meta, "Mine.query returned a tensor on meta where it was given one on cpu"),
    "integers": (lambda self, parts, q, x, site: q.long(), "Mine.query returned torch.int64 .* torch.float32"),
}


@pytest.mark.parametrize("what", RETURNED)
def test_a_mistake_in_what_a_place_returns(what):
    function, message = RETURNED[what]
    model = patch(make_model("gpt2"), defined(query=function)())
    with pytest.raises(HfpatchError, match=message):
        model(make_tokens())


OPTIONS = {"kind": Literal["one", "two", 3], "sizes": Optional[list[int]], "ends": tuple[str, ...] | None}  # noqa: UP045


def with_options():
    return defined(annotations=OPTIONS, kind="one", sizes=None, ends=None)


def test_options_of_every_type_are_checked_and_saved(tmp_path):
    method = with_options()
    config = method(kind=3, sizes=(1, 2), ends=["a"], seed=5)
    assert (config.sizes, config.ends) == ([1, 2], ("a",))
    config.save_pretrained(str(tmp_path))
    assert type(config).from_pretrained(str(tmp_path)) == config
    wrong = {
        "kind='tow'": r"kind='tow' must be of type Literal\['one', 'two', 3\] \(did you mean 'two'\?\)",
        "kind='3'": "kind='3' must be of type Literal",
        "kind=True": "kind=True must be of type Literal",
        "sizes='a'": r"sizes='a' must be of type .*list\[int\]",
        "ends=[1]": r"ends=\[1\] must be of type tuple\[str, ...\] | None",
    }
    for given, message in wrong.items():
        with pytest.raises(HfpatchError, match=message):
            eval(f"method({given})", {"method": method})
    with pytest.raises(HfpatchError, match=r"mine has no option 'kid' \(did you mean 'kind'\?\)"):
        validate_methods({"a": [{"type": "mine", "kid": "one"}]})


def test_what_json_does_not_tell_apart():
    listed, unordered = tuple[int, ...] | set[int], set[int] | tuple[int, ...]
    assert (fitting("a", [1, 2], listed), fitting("a", [1, 2], unordered)) == ((1, 2), {1, 2})
    assert fitting("a", 1, Literal[1, 2]) == 1
    assert fitting("a", True, Literal[1, 2] | bool) is True
    assert [fitting("a", value, Literal[1, "x"] | float) for value in (1, 1.0, 2)] == [1, 1.0, 2]
    for value, hint, kind in (
        (True, Literal[1, 2], "Literal[1, 2]"),
        (1.0, Literal[1, 2], "Literal[1, 2]"),
        ({1: ["b"]}, dict[str, list[str]], "dict[str, list[str]]"),
        ("float64", Literal["float32", "float"] | float, "Union[Literal['float32', 'float'], finite float]"),
    ):
        with pytest.raises(HfpatchError, match=re.escape(f"a={value!r} must be of type {kind}")):
            fitting("a", value, hint)


def test_a_class_that_is_defined_again_takes_the_place_of_the_first():
    """As a notebook's cell that runs again."""
    first = defined()
    model = get_peft_model(make_model("gpt2"), first())
    assert "mine" in NO_SIZE
    again = hfpatch.method("mine", size="rank")(defined(annotations={"rank": int}, rank=2))
    assert "mine" not in NO_SIZE
    assert SIZES["mine"].key == "rank"
    assert type(patch(make_model("gpt2"), again()).peft_config["mine"]) is again
    with pytest.raises(HfpatchError, match="mine: the model has adapters of an earlier definition"):
        model.add_adapter("other", again())


def test_a_patched_model_and_a_configuration_are_copied_pickled_and_saved(tmp_path, monkeypatch):
    import own_methods

    method = defined(annotations={"rank": int}, rank=2)
    monkeypatch.setattr(own_methods, "Mine", method, raising=False)  # where its module has it
    model = patch(make_model("llama"), [method(rank=3), LoraConfig(r=2, target_modules=["q_proj"])])
    perturb(model)
    expected = logits_of(model, make_tokens())
    torch.save(model, tmp_path / "model.pt")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)]  # noqa: E501  # fmt: skip
    hfpatch.unpatch(model)
    for copied in copies:
        assert torch.equal(logits_of(copied, make_tokens()), expected)
        assert copied.peft_config["mine"].rank == 3
    assert pickle.loads(pickle.dumps(method(rank=4))) == method(rank=4)
    assert dataclasses.replace(method(rank=4), seed=1).rank == 4


IN_A_NOTEBOOK = """
from dataclasses import dataclass
from torch import nn
import hfpatch

@hfpatch.method("gain")
@dataclass
class Gain(hfpatch.MethodConfig):
    def build(self, site, seed):
        return nn.ModuleDict({"gain": nn.Linear(site.hidden_size, site.width("value"), bias=False)})

    def value(self, parts, v, x, site):
        return v + parts["gain"](x)
"""


def test_a_method_of_a_notebook_does_everything_but_export(tmp_path, monkeypatch):
    notebook = types.ModuleType("a_notebook")  # in no file
    monkeypatch.setitem(sys.modules, "a_notebook", notebook)
    for _ in range(2):  # the cell runs twice
        exec(IN_A_NOTEBOOK, vars(notebook))
    model = patch(make_model("llama"), notebook.Gain())
    expected = logits_of(model, make_tokens())
    hfpatch.save_patch(model, tmp_path / "patch")
    assert torch.equal(logits_of(hfpatch.load_patch(make_model("llama"), tmp_path / "patch"), make_tokens()), expected)
    with pytest.raises(HfpatchError, match="in no file, so it cannot be copied; put the method into a file"):
        write_model(model, tmp_path)
