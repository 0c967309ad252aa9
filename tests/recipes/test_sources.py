import re

import pytest
from recipes.conftest import refused

from hfpatch.recipes.comparison import load_recipe
from hfpatch.recipes.data import DataSettings, split_by_weight

TWO = "data.mixture=[{source: a}, {source: b}]"


@pytest.fixture
def recipe(write):
    return write("{name: r, methods: {baseline: []}}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.mixture=[{source: a}]"], "data.mixture has one source; list two or more, or write it as data.source"),
        (["data.mixture=[{sorce: a}, {source: b}]"], r"'data.mixture.0.sorce' \(did you mean 'source'\?\)"),
        ([TWO, "data.mixture.1.wieght=2"], r"unknown key 'data.mixture.1.wieght' \(did you mean 'weight'\?\)"),
        ([TWO, "data.mixture.2.weight=2"], "'2' is not an index of a list of 2 items"),
        ([TWO, "data.mixture.1.weight=0"], "data.mixture.1.weight is 0; must be greater than 0"),
        ([TWO, "data.max_documents=3"], "data.max_documents applies to one source"),
        ([TWO, "data.mixture.0.source=a.bin"], "data.mixture: data.source a.bin is a token file"),
        ([TWO, "data.mixture.0.format=messages", "data.layout=stream"], "data.mixture: data.layout is stream"),
        ([TWO, "data.held_out=8", "data.mixture.0.max_documents=4"], r"data.held_out is 4; must be below .*\(4\)"),
        (["data.format=prompt_completion", "data.prompt_template=Ask"], "write {} once, where the prompt goes"),
        (["data.prompt_template=Ask {}"], "applies to data.format=prompt_completion, and data.format is text"),
        (["data.format=mesages"], "must be 'text', 'messages' or 'prompt_completion'"),
        (["data.format=messages", "data.text_column=x"], "data.text_column applies to data.format=text"),
        (["data.format=messages", "data.layout=stream"], "set data.layout=packed or padded"),
        (["data.split=train[:1%"], r"data.split is 'train\[:1%'; write a name or a slice of it"),
        (["data.split=train[:9%](pct1_dropremainder)"], "write a name or a slice of it"),
        (["data.split=train[5:5%]"], "both bounds must be numbers or both percentages"),
        (["data.split=train[:101%]"], "a percentage must be between -100% and 100%"),
        (["data.source=$HFPATCH_TEXTS/a.jsonl"], "data.source: .*the environment variable HFPATCH_TEXTS is not set"),
        (["data_dir=${HFPATCH_TEXTS}"], "data_dir: .*the environment variable HFPATCH_TEXTS is not set"),
        (["training.epochs=0"], "training.epochs is 0; must be greater than 0"),
        (["training={epochs: 1, steps: 3}"], "training.epochs and training.steps both say how long to train"),
        (["model.load_in_4bit=true", "model.load_in_8bit=true"], "model.load_in_4bit are both on"),
        (["model.bnb_4bit_quant_type=fp4"], "model.bnb_4bit_quant_type applies to 4-bit bases; set model.load_in_4bit"),
        (["model.attn_implementation=spda"], "model.attn_implementation is .spda.; must be 'eager', 'sdpa'"),
        (["model.device_map=atuo"], r"model.device_map has 'atuo' \(did you mean 'auto'\?\)"),
        (["model.device_map={lm_head: gpu}"], "model.device_map has 'gpu' .*; use disk or a device"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(recipe, overrides, message):
    assert re.search(message, refused(recipe, *overrides))


def test_paths_take_environment_variables(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HFPATCH_TEXTS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = ["model.name=~/model", "data_dir=$HFPATCH_TEXTS", "evaluation.include_path=${HFPATCH_TEXTS}/tasks"]
    read = load_recipe(recipe, ["data.mixture=[{source: '${HFPATCH_TEXTS}/a.jsonl'}, {source: owner/set}]", *paths])
    assert [source.source for source in read.data.mixture] == [f"{tmp_path}/a.jsonl", "owner/set"]
    assert read.model.name == str(tmp_path / "home" / "model")
    assert (read.data_dir, read.evaluation.include_path) == (tmp_path, tmp_path / "tasks")


def test_an_override_of_epochs_takes_the_place_of_steps(recipe):
    in_epochs = load_recipe("quickstart", ["training.epochs=2.5"])
    assert (in_epochs.training.epochs, "steps" in in_epochs.training.model_dump()) == (2.5, False)
    again = recipe.with_name("again.yaml")
    again.write_text(in_epochs.to_yaml())
    assert load_recipe(again) == in_epochs
    assert load_recipe(again, ["training.steps=7"]).training == load_recipe("quickstart", ["training.steps=7"]).training
    assert "epochs" not in load_recipe(recipe).training.model_dump()


def test_an_override_of_a_mixture_takes_the_place_of_the_source(recipe):
    texts = load_recipe("quickstart", [TWO, "data.max_documents=null"]).data
    assert (texts.named, texts.source) == ("a, b", DataSettings().source)
    assert load_recipe(recipe, [TWO, "data.source=c"]).data.named == "c"
    recipe.write_text("{name: r, data: {source: c, mixture: [{source: a}, {source: b}]}, methods: {baseline: []}}")
    assert "data.source applies to one source; set it in each" in refused(recipe)


def test_shares_are_whole_and_nearest():
    assert split_by_weight(10, [1, 1, 1]) == [4, 3, 3]
    assert split_by_weight(0, [2, 1]) == [0, 0]
    assert split_by_weight(7, [0.7, 0.2, 0.1]) == [5, 1, 1]
