from hfpatch.recipes.comparison import load_recipe
from hfpatch.recipes.controls import (
    LINEAR_NO_SKIP,
    LINEAR_PRE_PROJECTION,
    LINEAR_QUERY,
    NO_SKIP,
    QUERY_TEMPERATURE,
    SKIP_ALONE,
    controls_of,
    is_control,
)


def named(methods):
    return {name: [(each.name, each.keeps) for each in controls] for name, controls in controls_of(methods).items()}


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


def test_a_linear_one_with_a_skip_is_no_part_of_one_without():
    pre, linear = {"type": "pre_projection"}, {"type": "pre_projection", "activation": "identity"}
    methods = {"a": [pre], "b": [{**pre, "content_skip": True}], "c": [{**linear, "content_skip": True}]}
    assert named(methods) == {"b": [("a", NO_SKIP), ("c", LINEAR_PRE_PROJECTION)]}
    assert named({"a": [{**pre, "expansion": 2}], "b": [{**pre, "content_skip": True}]}) == {}
    assert named({"a": [pre, {"type": "lora"}], "c": [linear]}) == {}
    assert not is_control([{**linear, "gated": True}])
    assert is_control([{**pre, "expansion": 0.0, "content_skip": True}])
    assert not is_control([pre])
    assert not is_control([])
