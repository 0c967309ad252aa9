"""Which method is compared with which, and the controls of each."""

import pytest

from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.recipes.pairs import (
    CONTROLS,
    LINEAR_NO_SKIP,
    LINEAR_PRE_PROJECTION,
    LINEAR_QUERY,
    NO_SKIP,
    QUERY_TEMPERATURE,
    SKIP_ALONE,
    controls_of,
    kind_of,
    references,
)

PRE, QUERY = [{"type": "pre_projection"}], [{"type": "nonlinear_query"}]
LORA = [{"type": "lora", "r": 8}]
LINEAR, TEMPERATURE = [{"type": "nonlinear_query", "activation": "identity"}], [{"type": "query_temperature"}]
KEY = [{"type": "nonlinear_query", "targets": ["key"]}]
VALUE = [{"type": "nonlinear_query", "targets": ["value"]}]
BASE = ["baseline"]


def matched(parts, anchor):
    kept = {key: value for key, value in parts[0].items() if key != "r"}
    return [{**kept, "match": anchor}]


GATE = {"gate": [{"type": "output_gate"}], "same": matched(LORA, "gate"), "pre": matched(PRE, "gate")}


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ({"pre": PRE}, {"pre": []}),
        ({"pre": PRE, "lora": LORA}, {"pre": ["lora"], "lora": []}),
        ({"pre": PRE, "lora": LORA, "same": matched(LORA, "pre")}, {"pre": ["same"], "lora": [], "same": []}),
        ({"query": QUERY, "linear": LINEAR}, {"query": ["linear"], "linear": []}),
        ({"query": QUERY, "linear": LINEAR, "lora": LORA}, {"query": ["linear"], "linear": [], "lora": []}),
        ({"both": [*PRE, *LORA], "lora": LORA}, {"both": ["lora"], "lora": []}),
        (GATE, {"gate": ["same", "pre"], "same": [], "pre": ["same"]}),
        (  # a LoRA outside of the group is no one's control in it
            {**GATE, "lora": LORA, "other": PRE},
            {"gate": ["same", "pre"], "same": [], "pre": ["same"], "lora": [], "other": ["lora"]},
        ),
        (  # every LoRA of the group
            {**GATE, "mlp": [{**matched(LORA, "gate")[0], "target_modules": "mlp"}]},
            {"gate": ["same", "pre", "mlp"], "same": [], "pre": ["same", "mlp"], "mlp": []},
        ),
        (  # the LoRA that the others are matched to
            {"ours": LORA, "pre": matched(PRE, "ours"), "query": matched(QUERY, "ours")},
            {"ours": [], "pre": ["ours"], "query": ["ours"]},
        ),
        (  # a group without a LoRA
            {"pre": PRE, "loha": [{"type": "loha", "match": "pre"}], "lora": LORA},
            {"pre": ["loha"], "loha": [], "lora": []},
        ),
        (  # two groups
            {**GATE, "key": KEY, "small": matched(LORA, "key")},
            {"gate": ["same", "pre"], "same": [], "pre": ["same"], "key": ["small"], "small": []},
        ),
        (  # controls in a group, and those of a method in it
            {**GATE, "query": matched(QUERY, "gate"), "linear": matched(LINEAR, "gate"), "heat": TEMPERATURE},
            {
                **{"gate": ["same", "pre", "query", "linear"], "same": [], "pre": ["same"]},
                **{"query": ["same", "linear", "heat"], "linear": ["same"], "heat": []},
            },
        ),
    ],
)
def test_each_method_is_compared_with_methods_of_its_size_and_the_loras_of_its_group(methods, expected):
    recipe = Recipe.model_validate({"name": "any", "model": {"name": "gpt2"}, "methods": {"baseline": [], **methods}})
    assert {name: others[1:] for name, others in references(recipe).items()} == expected


def test_what_each_method_of_the_quickstart_is_compared_with():
    query = ["linear_control", "query_temperature"]
    assert references(load_recipe("quickstart")) == {
        "pre_projection": [*BASE, "lora", "linear_pre_projection"],
        "pre_projection_skip": [*BASE, "lora", "pre_projection", "skip_alone", "linear_pre_projection"],
        "pre_projection_lora": [*BASE, "lora"],
        "nonlinear_query": [*BASE, *query],
        "nonlinear_query_literal": [*BASE, *query],
        **dict.fromkeys(["lora", "skip_alone", "linear_pre_projection", "linear_control", "query_temperature"], BASE),
    }


@pytest.mark.parametrize("name", ["zoo", "pythia-160m-zoo"])
def test_every_method_of_the_zoo_that_is_matched_is_compared_with_the_lora_of_its_size(name):
    recipe = load_recipe(name)
    compared = references(recipe)
    group = [other for other, parts in recipe.methods.items() if parts and parts[0].get("match") == "output_gate"]
    assert len(group) == 8
    for other in {*group, "output_gate"} - {"lora"}:
        assert compared[other][1] == "lora"
    assert compared["canon_input"] == [*BASE, "lora_small"]


def named(methods):
    return {name: list(controls.items()) for name, controls in controls_of(methods).items()}


def test_the_quickstarts_methods_have_their_controls():
    linear, temperature = "linear_pre_projection", ("query_temperature", QUERY_TEMPERATURE)
    skipped = [("pre_projection", NO_SKIP), ("skip_alone", SKIP_ALONE), (linear, LINEAR_NO_SKIP)]
    assert named(load_recipe("quickstart").methods) == {
        "pre_projection": [(linear, LINEAR_PRE_PROJECTION)],
        "pre_projection_skip": skipped,
        "nonlinear_query": [("linear_control", LINEAR_QUERY), temperature],
        "nonlinear_query_literal": [temperature],  # the linear one is of the other form
    }


def test_controls_of_a_nonlinear_query_change_what_it_changes():
    of = {name: [{"type": "nonlinear_query", "targets": [name]}] for name in ("query", "key", "value")}
    linear = {f"linear_{name}": [{**parts[0], "activation": "identity"}] for name, parts in of.items()}
    heat = ("heat", QUERY_TEMPERATURE)
    assert named({**of, **linear, "heat": [{"type": "query_temperature"}]}) == {
        "query": [("linear_query", LINEAR_QUERY), heat],
        "key": [("linear_key", LINEAR_QUERY), heat],
        "value": [("linear_value", LINEAR_QUERY)],  # no temperature of the logits is a part of it
    }
    wrong = {
        f"{name}_{value}": [{**of["query"][0], name: value}] for name in ("targets", "form") for value in (5, {}, None)
    }
    assert not any(LINEAR_QUERY in dict(controls).values() for controls in named({**wrong, **linear}).values())


def test_a_linear_one_with_a_skip_is_no_part_of_one_without():
    pre, linear = {"type": "pre_projection"}, {"type": "pre_projection", "activation": "identity"}
    methods = {"a": [pre], "b": [{**pre, "content_skip": True}], "c": [{**linear, "content_skip": True}]}
    assert named(methods) == {"b": [("a", NO_SKIP), ("c", LINEAR_PRE_PROJECTION)]}
    assert named({"a": [{**pre, "expansion": 2}], "b": [{**pre, "content_skip": True}]}) == {}
    assert named({"a": [pre, {"type": "lora"}], "c": [linear]}) == {}
    assert kind_of([{**linear, "gated": True}]) not in CONTROLS
    assert kind_of([{**pre, "expansion": 0.0, "content_skip": True}]) in CONTROLS
    assert kind_of([pre]) not in CONTROLS
    assert kind_of([]) not in CONTROLS
