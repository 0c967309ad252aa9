import pytest
from pydantic import ValidationError

from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.retention import BASE_LANGUAGE, task_of

MINIMAL = {
    "name": "small",
    "data": {"block_size": 64, "held_out": 5},
    "tuning": {"learning_rates": [1e-4, 1e-3]},
    "evaluation": {"tasks": ["tinyworld_cloze"]},
    "methods": {"baseline": [], "lora": [{"type": "lora", "r": 2}]},
}


def read(**sections):
    return Recipe.model_validate(MINIMAL | sections)


def texts_of(recipe):
    return recipe.retention.data(recipe.model.name, recipe.data)


def test_a_tinyworld_base_keeps_its_own_language_by_default():
    texts = texts_of(read(retention={}))
    text = texts[BASE_LANGUAGE]
    assert set(texts) == {BASE_LANGUAGE}
    assert (text.source, text.max_documents, text.block_size, text.layout) == ("tinyworld/base", 200, 64, "packed")


def test_texts_are_read_as_the_training_text_is():
    data = {"block_size": 64, "held_out": 5, "min_characters": 7, "append_eos": False, "layout": "padded"}
    data |= {"seed": 4, "scored_tokens": 50}
    texts = {"new": {"source": "a.txt"}, "old": {"source": "b.txt", "max_documents": 3}}
    texts |= {"long": {"source": "c.txt", "max_documents": 30}, "hub": {"source": "x/y", "streaming": True}}
    read_texts = texts_of(read(data=data, retention={"texts": texts, "documents": 9, "block_size": 32}))
    read_and_drawn = {name: (data.max_documents, data.held_out) for name, data in read_texts.items()}
    assert read_and_drawn == {"new": (None, 9), "old": (3, None), "long": (30, 9), "hub": (9, None)}
    for data in read_texts.values():
        assert (data.seed, data.scored_tokens) == (4, 50)
        assert (data.min_characters, data.append_eos, data.layout, data.block_size) == (7, False, "padded", 32)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"name": "gpt2"}, "retention": {}}, "retention.texts names no text"),
        ({"retention": {"texts": {"a/b": {"source": "x.txt"}}}}, "retention.texts.a/b becomes a file"),
        ({"retention": {"texts": {"a": {"source": "x.bin"}}}}, "retention.texts.a.source x.bin is a token file"),
        ({"retention": {"tasks": ["tinyworld_clozes"]}}, "retention.tasks names 'tinyworld_clozes'"),
        (
            {"evaluation": {"tasks": [task_of("a")]}, "retention": {"texts": {"a": {"source": "x.txt"}}}},
            "retention.texts.a is scored as retention_a, the name of a task",
        ),
        ({"retention": {"documents": 10**9}}, "data.max_documents is 1000000000, and of tinyworld/base"),
        ({"retention": {"block_size": 10**9}}, "less than or equal to 16777216"),
        ({"rewind": [0.5]}, "rewind needs retention"),
        ({"rewind": [0.5], "retention": {}, "tuning": None}, "rewind needs tuning"),
        ({"rewind": [0.5], "retention": {}, "data": {}}, "rewind needs data.held_out"),
        ({"rewind": [0.5, 1], "retention": {}}, "rewind lists 1"),
        ({"rewind": [0, 0.5], "retention": {}}, "rewind lists 0"),
        ({"rewind": [-0.5], "retention": {}}, "rewind lists -0.5"),
        ({"rewind": [0.5, 0.5], "retention": {}}, "rewind lists 0.5 twice"),
    ],
)
def test_contradictions_are_refused(sections, message):
    with pytest.raises(ValidationError) as error:
        read(**sections)
    assert message in str(error.value)


def test_trials_of_tuning_and_parts_of_a_recipe_stay_valid():
    recipe = read(rewind=[0.25, 0.5], retention={})
    assert all(recipe.tuned("lora", {"lr": 1e-3}, trial=trial).rewind == () for trial in (False, True))
    assert recipe.only(["lora"]).rewind == (0.25, 0.5)
