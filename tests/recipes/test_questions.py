"""The primary questions and margins of a recipe."""

import pytest
from pydantic import ValidationError

from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.recipes.pairs import references
from hfpatch.recipes.questions import Asked

MINIMAL = {
    "name": "small",
    "model": {"name": "gpt2"},
    "evaluation": {"tasks": ["hellaswag", "wikitext"]},
    "methods": {
        "baseline": [],
        "pre": [{"type": "pre_projection"}],
        "linear": [{"type": "pre_projection", "activation": "identity"}],
        "large": [{"type": "pre_projection", "expansion": 8}],
        "lora": [{"type": "lora", "match": "pre"}],
        "other": [{"type": "lora", "match": "linear"}],
    },
}
SIZES = {"baseline": 0, "pre": 1000, "linear": 1000, "large": 6000, "lora": 1005, "other": 1020}
TASKS = {"hellaswag": False, "wikitext": True}


def read(**sections):
    return Recipe.model_validate(MINIMAL | sections)


def test_by_default_each_method_is_compared_with_the_lora_of_its_size_on_the_first_text():
    gain = Asked(question="gain", pairs=[("pre", "lora")], on=["wikitext"])
    assert read().asked(SIZES, TASKS) == [gain]  # the other LoRA is 2 % larger, the large one matched by none
    assert read(data={"held_out": 20}).asked(SIZES, TASKS)[0].on == ["held_out_text"]
    assert read().asked(SIZES, {"hellaswag": False})[0].on == ["hellaswag"]
    assert read().asked(SIZES | {"lora": 1011}, TASKS) == []


def test_by_default_what_retention_names_is_to_be_kept_by_all():
    text = {"old": {"source": "tinyworld/base"}}
    (_, keep) = read(retention={"texts": text}).asked(SIZES, TASKS)
    assert keep.pairs == [(name, "baseline") for name in ("pre", "linear", "large", "lora", "other")]
    assert keep.on == ["retention_old", "hellaswag", "wikitext"]
    (_, keep) = read(retention={"texts": text, "tasks": ["hellaswag"]}).asked(SIZES, TASKS)
    assert keep.on == ["retention_old", "hellaswag"]


def test_what_a_recipe_asks_is_asked_and_compared():
    questions = {
        "gain": {"on": "hellaswag", "pairs": [["large", "lora"], ["linear", "baseline"]]},
        "keep": {"on": ["old", "wikitext"], "methods": ["pre"]},
    }
    recipe = read(questions=questions, retention={"texts": {"old": {"source": "tinyworld/base"}}})
    gain = Asked(question="gain", pairs=[("large", "lora"), ("linear", "baseline")], on=["hellaswag"])
    keep = Asked(question="keep", pairs=[("pre", "baseline")], on=["retention_old", "wikitext"])
    assert recipe.asked(SIZES, TASKS) == [gain, keep]
    assert references(recipe)["large"] == ["baseline", "lora", "linear"]
    assert references(recipe)["linear"].count("baseline") == 1
    assert recipe.only(["pre", "lora"]).asked(SIZES, TASKS) == [keep]
    assert read(questions={"gain": None, "keep": None}).asked(SIZES, TASKS) == []


def test_margins_are_by_task_and_measure():
    assert read().margins == {"nats_per_token": 0.02, "bits_per_byte": 0.01, "accuracy": 0.01}
    assert read(model={"name": "tinyworld/gpt2"}).margins["bits_per_byte"] == 0.005
    margins = read(margin={"bits_per_byte": None, "wikitext": 0.07}).margins
    assert margins == {"nats_per_token": 0.02, "accuracy": 0.01, "wikitext": 0.07}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"questions": {"gain": {"on": "held_out_text"}}}, "questions.gain.on is 'held_out_text'.*data.held_out takes"),
        ({"questions": {"gain": {"on": "wikitxt"}}}, "not among evaluation.tasks .did you mean 'wikitext'"),
        ({"questions": {"gain": {"pairs": [["pre", "lara"]]}}}, "names 'lara', which is not among methods"),
        ({"questions": {"gain": {"pairs": [["baseline", "pre"]]}}}, "name one of methods but the baseline"),
        ({"questions": {"gain": {"pairs": [["pre", "lora"], ["pre", "lora"]]}}}, "lists \\('pre', 'lora'\\) twice"),
        ({"questions": {"keep": {"on": ["old"]}}}, "questions.keep.on names 'old'"),
        ({"questions": {"keep": {"on": ["wikitext", "wikitext"]}}}, "lists 'wikitext' twice"),
        ({"questions": {"keep": {"methods": ["baseline"]}}}, "not among the trained methods"),
        ({"margin": {"nats_per_tokn": 0.1}}, "margin.nats_per_tokn names no task and no measure"),
        ({"margin": {"wikitext": 0}}, "greater than 0"),
    ],
)
def test_a_mistake_is_one_line(sections, message):
    with pytest.raises(ValidationError, match=message):
        read(**sections)


def test_a_question_about_methods_with_budgets_is_asked_at_each(write):
    text = "name: sizes\nmodel: {name: gpt2}\nevaluation: {tasks: [wikitext]}\nbudgets: [1000, 2000]\nmethods:\n"
    text += "  baseline: []\n  pre: [{type: pre_projection}]\n  lora: [{type: lora}]\n  one: [{type: lora, r: 4}]\n"
    text += "questions: {gain: {pairs: [[pre, lora], [pre, one]]}, keep: {on: [wikitext], methods: [pre]}}\n"
    recipe = load_recipe(write(text))
    sizes = dict.fromkeys(recipe.methods, 1)
    gain, keep = recipe.asked(sizes, {"wikitext": True})
    assert gain.pairs == [("pre@1k", "lora@1k"), ("pre@2k", "lora@2k"), ("pre@1k", "one"), ("pre@2k", "one")]
    assert keep.pairs == [("pre@1k", "baseline"), ("pre@2k", "baseline")]
    assert references(recipe)["pre@1k"] == ["baseline", "lora@1k", "one"]
    assert [question.pairs for question in recipe.only(["pre@1k", "lora@1k"]).asked(sizes, {"wikitext": True})] == [
        [("pre@1k", "lora@1k")],
        [("pre@1k", "baseline")],
    ]
