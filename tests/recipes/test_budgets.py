"""A method at several budgets: what the recipe becomes, and mistakes in one line each."""

import re

import pytest
from recipes.conftest import refused

from hfpatch.recipes.budgets import TOLERANCE, budget_text, points_of
from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.recipes.pairs import references

RECIPE = """
name: sizes
budgets: [65_000, 10_000]
methods:
  baseline: []
  pre_projection:
    - type: pre_projection
  linear:
    - type: pre_projection
      activation: identity
  both:
    - type: pre_projection
    - {type: lora, r: 2}
  lora:
    - type: lora
  fixed:
    - {type: lora, r: 8, target_modules: mlp}
  heat:
    - type: query_temperature
"""
RATES = "tuning.learning_rates=[1e-3, 1e-2]"


@pytest.fixture
def read(write):
    return lambda *overrides, text=RECIPE: load_recipe(write(text), overrides)


def test_each_method_whose_size_is_open_becomes_a_method_for_each_budget(read):
    recipe = read()
    assert list(recipe.methods) == [
        *("baseline", "pre_projection@10k", "pre_projection@65k", "linear@10k", "linear@65k", "both@10k", "both@65k"),
        *("lora@10k", "lora@65k", "fixed", "heat"),
    ]
    assert recipe.methods["lora@65k"] == [{"type": "lora", "match": 65000}]
    assert recipe.methods["both@10k"] == [{"type": "pre_projection", "match": 10000}, {"type": "lora", "r": 2}]
    assert recipe.methods["fixed"] == [{"type": "lora", "r": 8, "target_modules": "mlp"}]


def test_what_was_read_is_a_recipe_of_ordinary_methods(read, tmp_path):
    recipe = read(RATES, "labels={lora: LoRA}")
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert "budgets" not in recipe.to_yaml()
    assert (1 + TOLERANCE) / (1 - TOLERANCE) < 1.25  # so that no size serves two budgets


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        *((1, "1"), (999, "999"), (1000, "1k"), (1234, "1234"), (10_000, "10k"), (65_500, "65.5k"), (65_536, "65536")),
        *((1_000_000, "1M"), (1_500_000, "1.5M"), (1_550_000, "1550k"), (12_345_678, "12345678")),
        *(("0.1%", "0.1%"), (" 1.0 %", "1%"), (".05%", "0.05%")),
    ],
)
def test_a_budget_in_a_name_says_all_its_digits(budget, text):
    assert budget_text(budget) == text


def test_budgets_of_one_method_in_its_part(read):
    text = RECIPE.replace("- type: lora\n", "- {type: lora, budgets: [0.5%, 0.1%]}\n")
    recipe = read(
        text=text.replace("- type: pre_projection\n  linear", "- {type: pre_projection, budgets: []}\n  linear")
    )
    assert points_of("lora", recipe.methods) == ["lora@0.1%", "lora@0.5%"]
    assert recipe.methods["pre_projection"] == [{"type": "pre_projection"}]
    alone = read("budgets=null", text=text)
    assert [name for name in alone.methods if "@" in name] == ["lora@0.1%", "lora@0.5%"]


def test_each_budget_is_compared_with_the_lora_and_the_controls_of_its_own(read):
    compared = references(read())
    for budget in ("10k", "65k"):
        assert compared[f"pre_projection@{budget}"] == ["baseline", f"lora@{budget}", f"linear@{budget}"]
        assert compared[f"linear@{budget}"] == ["baseline", f"lora@{budget}"]
        assert compared[f"both@{budget}"] == ["baseline", f"lora@{budget}"]
        assert compared[f"lora@{budget}"] == ["baseline"]
    assert compared["heat"] == compared["fixed"] == ["baseline"]


def test_labels_and_the_grid_of_tuning_are_of_every_budget(read):
    grid = "tuning.grid={methods.lora.0.lora_alpha: [1, 2], methods.fixed.0.lora_alpha: [1, 2]}"
    kept = [f"methods.{name}=null" for name in ("pre_projection", "linear", "both", "heat")]
    recipe = read(RATES, grid, *kept, "labels={lora: LoRA}")
    assert recipe.labels == {"lora@10k": "LoRA@10k", "lora@65k": "LoRA@65k"}
    assert set(recipe.tuning.grid) == {f"methods.{name}.0.lora_alpha" for name in ("lora@10k", "lora@65k", "fixed")}


def test_some_methods_of_a_recipe_with_budgets(read):
    recipe = read(RATES)
    assert recipe.only(["lora"]).trained == ["lora@10k", "lora@65k"]
    assert recipe.only(["lora@10k"]).trained == ["lora@10k"]


BAD = [
    (["budgets=10_000"], "budgets is 10000; must be a list"),
    (["budgets=[0]"], "budgets contains 0; must be a number of parameters, such as 65_000, or a share"),
    (["budgets=[true]"], "budgets contains true"),
    (["budgets=[1.5]"], "budgets contains 1.5"),
    (["budgets=[10k]"], "budgets contains '10k'"),
    (["budgets=[0%]"], "budgets contains '0%'"),
    (["budgets=[10_000, 1%]"], "budgets mixes numbers of parameters and shares of the base's"),
    (["budgets=[10_000, 10_000]"], "budgets contains 10000 and 10000; keep budgets a factor of 1.25 apart"),
    (["budgets=[12_000, 10_000]"], "budgets contains 10000 and 12000; keep"),
    (["methods.lora.0.budgets=[-1]"], r"methods.lora.0.budgets contains -1"),
    (["methods.heat.0.budgets=[100]"], "methods.heat.0.budgets: query_temperature has no size to solve for"),
    (["methods.fixed.0.budgets=[100]"], "methods.fixed.0 has both r and budgets; leave one out"),
    (["methods.fixed=[{type: lora, match: lora}]"], "methods.fixed has match: lora, which has several budgets"),
    (["methods.lora.0.match=both", "methods.lora.0.budgets=[9]"], "methods.lora.0 has both match and budgets"),
    (["methods.both.1.r=null", "methods.both.1={type: lora}"], "methods.both has 2 parts without a size"),
    (["methods.heat.0.type=own:Class"], "methods.heat.0: hfpatch cannot tell whether own:Class has a size"),
    (["methods.heat.0.type=loraa"], r"whether loraa .* before loading it \(did you mean 'lora'\?\)"),
    (["methods={baseline: [], lora: [{type: lora, r: 8}]}"], "budgets: every method has a size"),
    (["methods.lora@10k=[{type: lora, match: 10_000}]"], "methods.lora@10k is given twice"),
    (["methods.a@20k=[{type: lora, match: 10_000}]"], "the name 'a@20k': the part after @ must be the budget"),
    (["methods.a@b=[{type: lora, r: 8}]"], "the name 'a@b': the part after @ must be the budget"),
    (["methods.fixed=[{type: lora, match: 0}]"], "methods.fixed.0.match is 0, which is not among methods"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD)
def test_a_mistake_is_one_line(write, overrides, message):
    assert re.search(message, refused(write(RECIPE), *overrides))


def test_a_recipe_made_in_python_names_the_methods_itself(read):
    made = {"name": "any", "methods": {"baseline": [], "lora@10k": [{"type": "lora", "match": 10000}]}}
    assert Recipe.model_validate(made).methods["lora@10k"]
    with pytest.raises(ValueError, match="load_recipe reads budgets"):
        Recipe.model_validate({**made, "budgets": (10_000,)})
