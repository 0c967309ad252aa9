"""Recipes: read strictly, overridden by dotted keys, written back unchanged."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes.conftest import refused

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.recipes.pairs import left_out_of_pairs
from hfpatch.recipes.strict import read_yaml, write_yaml
from hfpatch.recipes.training import TrainingSettings

PLAIN = """\
name: small
training:
  steps: 100
methods:
  baseline: []
  pre_projection:
    - type: pre_projection
  lora:
    - type: lora
      r: 4
"""


@pytest.mark.parametrize(
    ("overrides", "read", "expected"),
    [
        (["training.steps=60"], lambda r: r.training.steps, 60),
        (["training.seeds=[0, 3]"], lambda r: r.training.seeds, (0, 3)),
        (["training.lr=1e-3"], lambda r: r.training.lr, 1e-3),
        (["training.lr=2"], lambda r: r.training.lr, 2.0),
        (["model.revision=step1000"], lambda r: r.model.revision, "step1000"),
        (["model.revision=null"], lambda r: r.model.revision, None),
        (["data_dir=../data"], lambda r: r.data_dir, Path("../data")),
        (["description=a=b"], lambda r: r.description, "a=b"),
        (["methods.lora.0.r=16"], lambda r: r.methods["lora"][0]["r"], 16),
        (["methods.new=[{type: lora, r: 1}]"], lambda r: r.methods["new"], [{"type": "lora", "r": 1}]),
        (["training.seeds=3"], lambda r: r.training.seeds, (0, 1, 2)),
        (["training.seeds=[3, 1]"], lambda r: r.training.seeds, (3, 1)),
        (["training.seeds={looks: [2, 4]}"], lambda r: r.training.all_seeds, (0, 1, 2, 3)),
        (["training.seeds={looks: [2, 4]}"], lambda r: r.training.first_seeds, (0, 1)),
        (["training.seeds={looks: [2, 4]}", "training.seeds.looks=[3]"], lambda r: r.training.looks, (3,)),
        (["training.steps=70", "training.steps=80"], lambda r: r.training.steps, 80),
    ],
)
def test_overrides_are_yaml_values_under_dotted_keys(write, overrides, read, expected):
    assert read(load_recipe(write(PLAIN), overrides)) == expected


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.step=60", ["training.step", "did you mean 'steps'"]),
        ("trainin.steps=60", ["trainin", "did you mean 'training'"]),
        ("steps=60", ["unknown key 'steps'", "did you mean 'training.steps'"]),
        ("source=x", ["did you mean 'data.source'"]),
        ("data.lr=1", ["did you mean 'training.lr'"]),
        ("methods.lor.0.r=60", ["there is no 'lor' in methods (did you mean 'lora'?)", "write methods.lor={0: ...}"]),
        ("methods.lora.3.r=60", ["'3'", "list of 1"]),
        ("methods.lora.0.r.x=60", ["'x'", "number"]),
        ("name.first=x", ["'first'", "text"]),
        ("training.steps", ["key=value"]),
        ("=60", ["key=value"]),
        ("training.seeds=[0", ["not valid YAML"]),
        ("name={{ name }}", ["not valid YAML", "a key is a list or a mapping"]),
        ("methods.lora.².r=4", ["'²' is not an index of a list of 1 items"]),
        ("methods.lora.lr=3e-3", ["not an index", "has no rate of its own: tuning: ", "training.learning_rates"]),
        ("training.decay_steps=5", ["training.decay_steps is for training.schedule=wsd", "is cosine"]),
        ("training.seeds=[-1]", ["training.seeds.0 is -1; must be greater than or equal to 0"]),
        ("training.seeds=0", ["training.seeds: must be a list of seeds, or how many", "not 0"]),
        ("training.seeds=1000000000", ["how many from 1 to 1000"]),
        ("training.seeds=true", ["training.seeds is true; must be a list"]),
        ("training.seeds={looks: 4}", ["training.seeds.looks is 4; must be a list"]),
        ("training.seeds={looks: []}", ["training.seeds.looks is []; must have at least 1 item"]),
        ("training.seeds={looks: [1, 4]}", ["training.seeds.looks: is [1, 4]", "growing", "from 2"]),
        ("training.seeds={looks: [4, 4]}", ["training.seeds.looks: is [4, 4]", "growing"]),
        ("training.seeds={looks: [4, 2000]}", ["training.seeds.looks: is [4, 2000]", "to 1000"]),
        ("training.seeds={look: [4]}", ["unknown key 'training.seeds.look'", "did you mean"]),
        ("training.steps=sixty", ["training.steps", '"sixty"', "integer"]),
    ],
)
def test_a_wrong_override_is_named(write, override, parts):
    message = refused(write(PLAIN), override)
    assert all(part in message for part in [override, *parts]), message
    flat = write(PLAIN.replace("training:\n  steps: 100", "training: 100"))
    assert "'steps' is below a number" in refused(flat, "training.steps=60")


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("steps: 100", "stesp: 100", ["training.stesp", "unknown key", "did you mean 'steps'"]),
        ("name: small", "name: small\nseeds: [1]", ["unknown key 'seeds'", "did you mean 'training.seeds'"]),
        ("training:", "trainning:", ["trainning", "did you mean 'training'"]),
        ("name: small\n", "", ["name is missing"]),
        ("steps: 100", "steps: true", ["training.steps", "true", "integer"]),
        ("steps: 100", "steps: '100'", ["training.steps", '"100"', "integer"]),
        ("steps: 100", "steps: 0", ["training.steps", "0", "greater than 0"]),
        ("steps: 100", "lr: .inf", ["training.lr", "inf", "finite"]),
        ("steps: 100", "schedule: cosin", ["training.schedule", '"cosin"', "'cosine'"]),
        ("steps: 100", "seeds: []", ["training.seeds is []; must have at least 1 item"]),
        ("steps: 100", "seeds: [0, x]", ["training.seeds.1", '"x"', "integer"]),
        ("  steps: 100", "  - steps", ["training", "mapping"]),
        ("name: small", "name: 7", ["name", "7", "string"]),
        ("name: small", "name: small\nname: other", ["line 2", "'name'", "twice"]),
        ("  lora:", "  no:", ["line 8", "the key 'no'", "quotes"]),
        ("name: small", "name: small\nevaluation: {batch_size: 0}", ["evaluation.batch_size", "greater than 0"]),
        ("name: small", "name: small\nevaluation: {tasks: []}", ["evaluation.tasks is []", "data.held_out"]),
        ("name: small", "name: small\nmodel: {dtype: int8}", ["model.dtype", '"int8"', "'float32'"]),
        # contradictions
        ("steps: 100", "steps: 50", ["warmup_steps is 50 (the default); must be", "below training.steps (50)"]),
        ("steps: 100", "micro_batch_size: 3", ["micro_batch_size is 3", "divide", "16"]),
        ("steps: 100", "micro_batch_size: 32", ["micro_batch_size is 32", "divide", "16"]),
        ("steps: 100", "keep_best: true", ["training.keep_best compares evaluations", "set training.evaluate_every"]),
        ("steps: 100", "keep_checkpoints: 2", ["training.keep_checkpoints is 2", "set training.save_every"]),
        ("steps: 100", "min_lr_ratio: 0.1\n  schedule: linear", ["min_lr_ratio is for training.schedule=cosine or"]),
        ("steps: 100", "seeds: [4294967296]", ["training.seeds", "less than 4294967296"]),
        ("steps: 100", "seeds: [1, 1]", ["training.seeds", "twice"]),
        ("steps: 100", "seeds: {looks: [2, 4]}\nquestions: {gain: null, keep: null}", ["looks", "primary question"]),
        ("name: small", "name: small\nevaluation: {tasks: [a, a]}", ["evaluation.tasks", "twice"]),
        ("name: small", "name: a/b", ["'a/b'", "folder"]),
        ("  lora:", "  ../lora:", ["'../lora'", "folder"]),
        ("  baseline: []\n", "", ["baseline", "add 'baseline: []'"]),
        ("  baseline: []", "  baselin: []", ["did you mean 'baselin'"]),
        ("baseline: []", "baseline: [{type: lora}]", ["methods.baseline", "must be []"]),
        ("  baseline: []", "  baseline: []\n  nothing: []", ["methods.nothing", "second baseline"]),
        ("      r: 4", "      match: pre_projection\n      r: 4", ["methods.lora.0", "both r and match"]),
        ("      r: 4", "      match: pre_projectoin", ["methods.lora.0.match", "did you mean 'pre_projection'"]),
        ("      r: 4", "      match: null", ["methods.lora.0.match is null", "leave it out"]),
        (
            "steps: 100",
            "learning_rates: {querry: 1}",
            ["'training.learning_rates.querry' (did you mean 'query'?); must be"],
        ),
        ("      r: 4", "      match: lora", ["methods.lora.0.match", "itself"]),
        ("type: lora\n      r: 4", "type: {}\n      match: lora", ["methods.lora.0.match", "itself"]),
        ("      r: 4", "      match: baseline", ["methods.lora.0.match", "baseline"]),
        ("type: pre_projection", "gated: true", ["methods.pre_projection.0", "no type"]),
        ("      r: 4", "      match: other\n  other:\n    - type: lora\n      match: lora", ["matches another method"]),
    ],
)
def test_a_wrong_key_type_or_value_and_a_contradiction_are_named(write, old, new, parts):
    assert old in PLAIN
    path = write(PLAIN.replace(old, new))
    message = refused(path)
    assert all(part in message for part in [str(path), *parts]), message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 5}, "training.warmup_steps is 50 (the default); must be below training.steps (5)"),
        ({"lr": -1}, "lr is -1; must be greater than 0"),
        ({"rl": 1e-3}, "unknown key 'rl' (did you mean 'lr'?)"),
    ],
)
def test_a_mistake_of_a_section_made_in_python_is_one_line(values, message):
    with pytest.raises(HfpatchError, match=f"^TrainingSettings: {re.escape(message)}$"):
        TrainingSettings(**values)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("name: [a\nmethods: {}\n", ["not valid YAML", "line 2"]),
        ("name: small\n\tx: 1\n", ["not valid YAML", "line 2"]),
        (b"name: caf\xe9\n", ["not UTF-8"]),
        ("", ["is empty"]),
        ("# only a comment\n", ["is empty"]),
        ("- a\n- b\n", ["contains a list", "mapping"]),
        ("just words\n", ["contains a text", "mapping"]),
        ("name: !!python/object:os.system x\n", ["not valid YAML"]),
        ("name: \x01\n", ["not valid YAML"]),
        ('name: "\\ud800"\nmethods: {}\n', ["name is '\\ud800'; must be Unicode text"]),
        ("name: small\n? [a, b]\n: 1\n", ["not valid YAML", "line 2", "a key is a list or a mapping"]),
        ("name: &a [*a]\n", ["not valid YAML", "line 1", "aliases are not read"]),
        ("name: &a {x: 1}\nmodel: {<<: *a}\n", ["not valid YAML", "line 2", "aliases are not read"]),
        ("model: {<<: {name: x}}\n", ["not valid YAML", "line 1", "merge keys (<<) are not read"]),
        ("name: " + "[" * 5000 + "]" * 5000, ["not valid YAML", "nested too deeply"]),
    ],
)
def test_a_file_that_is_no_recipe_is_named(write, content, parts):
    path = write(content)
    message = refused(path)
    assert all(part in message for part in [str(path), *parts]), message


def test_files_folders_and_bare_names(write, tmp_path, monkeypatch):
    assert "no such file" in refused(tmp_path / "absent.yaml")
    assert "is a folder" in refused(tmp_path)
    assert load_recipe("quickstart") == load_recipe("quickstart.yaml")
    assert load_recipe("quickstart").name == "quickstart"
    assert "did you mean 'quickstart'" in refused(Path("quikstart"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "mine").mkdir()
    assert load_recipe("quickstart").name == "quickstart"  # before a folder of that name
    assert "is a folder" in refused(Path("mine"))
    (tmp_path / "quickstart").rmdir()
    write(PLAIN, "quickstart")
    assert load_recipe("quickstart").name == "small"  # but after a file of that name


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_names = st.from_regex(r"[a-z][a-z0-9_.-]{0,8}", fullmatch=True)
_parts = st.lists(
    st.dictionaries(_names, _scalars | st.lists(_scalars, max_size=3), max_size=3), min_size=1, max_size=2
)


@settings(max_examples=60, deadline=None)
@given(
    description=st.text(),
    revision=st.none() | st.text(),
    lr=st.floats(min_value=1e-12, max_value=1e6, exclude_min=True),
    seeds=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3, unique=True),
    methods=st.dictionaries(_names, _parts, max_size=3),
)
def test_what_is_written_back_reads_as_the_same_recipe(tmp_path_factory, description, revision, lr, seeds, methods):
    typed = {name: [{"r": 1, **part, "type": "lora"} for part in parts] for name, parts in methods.items()}
    for parts in typed.values():
        for part in parts:
            part.pop("match", None)
    raw = {"name": "any", "description": description, "methods": {**typed, "baseline": []}}
    sections = {"model": {"revision": revision}, "training": {"lr": lr, "seeds": seeds}}
    recipe = Recipe.model_validate(raw | sections)
    path = tmp_path_factory.mktemp("written") / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8", newline="\n")
    assert load_recipe(path) == recipe


def test_text_that_looks_like_something_else_stays_text_and_numbers_are_read_as_people_write_them(write):
    texts = ["1e-5", "1e5", "2024-01-01", "no", "null", "1_0", "0x10", ".5e3", "~", "1:30"]
    for value in [*texts, "é\n", "\x85", "\u2028", "\ufeff"]:
        assert read_yaml(write(write_yaml({"key": value}))) == {"key": value}
    twice = {"key": texts, "other": texts}  # one list, which is written out in both places
    assert read_yaml(write(write_yaml(twice))) == twice
    for text, number in {"1e-5": 1e-5, "1E3": 1e3, "-2.5e+1": -25.0, "3.": 3.0, ".5": 0.5}.items():
        assert read_yaml(write(f"key: {text}\n")) == {"key": number}


def test_reading_a_recipe_imports_no_framework():
    code = (
        "import sys; from hfpatch.recipes.comparison import load_recipe; load_recipe('quickstart');"
        "from hfpatch.recipes.pretraining import load_pretraining as load; load('queries-books');"
        "print({'torch', 'transformers', 'peft', 'lm_eval', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("training.patience=2", "training.patience needs the loss on held-out text"),
        ("training.keep_best=true", "training.keep_best needs the loss on held-out text"),
        ("training.evaluate_every=5", "training.evaluate_every needs held-out text"),
        ("data.scored_tokens=9", "data.scored_tokens is for held-out, tuning or retention text"),
        ("data.seed=1", "data.seed is for held-out, tuning or retention text"),
    ],
)
def test_what_goes_by_held_out_text_needs_some(setting, expected):
    without = ["data.held_out=null", *(["training.evaluate_every=null"] if setting.startswith("data.") else [])]
    message = refused("quickstart", setting, *without)
    assert expected in message
    assert "set data.held_out" in message
    load_recipe("quickstart", [setting, "data.held_out=100"])


SIX = """\
name: six
tuning:
  learning_rates: [0.001, 0.01]
  grid:
    methods.lora.0.lora_alpha: [4, 8]
    methods.pre_projection.0.expansion: [1, 2]
    methods.matched.0.lora_alpha: [4, 8]
training: {steps: 60}
data: {max_documents: 1000}
methods:
  baseline: []
  pre_projection: [{type: pre_projection}]
  lora: [{type: lora, r: 4}]
  matched: [{type: lora, match: pre_projection}]
"""


def test_some_methods_of_a_recipe_are_a_recipe_with_the_baseline(write):
    recipe = load_recipe(write(SIX))
    some = recipe.only(["matched", "pre_projection"])
    assert list(some.methods) == ["baseline", "pre_projection", "matched"]
    assert list(some.tuning.grid) == ["methods.pre_projection.0.expansion", "methods.matched.0.lora_alpha"]
    kept = {"methods", "tuning"}
    assert some.model_dump(exclude=kept) == recipe.model_dump(exclude=kept)
    assert recipe.only(recipe.methods) == recipe
    assert list(recipe.only(["baseline"]).methods) == ["baseline"]
    assert left_out_of_pairs(recipe, some) == []
    assert left_out_of_pairs(recipe, recipe.only(["pre_projection"])) == [
        "pre_projection is not compared with matched, which --methods leaves out"
    ]
    for methods, expected in {
        ("lroa",): "--methods: no method 'lroa' in six (did you mean 'lora'?)",
        ("x",): "--methods: no method 'x' in six; there are pre_projection, lora, matched",
        ("lora", "matched"): "--methods: matched has the size of pre_projection (match), which is left out; add it",
        (): "--methods names no method of six; there are pre_projection, lora, matched",
    }.items():
        with pytest.raises(HfpatchError, match=f"^{re.escape(expected)}$"):
            recipe.only(methods)
    with pytest.raises(HfpatchError, match=r"no method 'x' in six; there is baseline$"):
        recipe.only(["baseline"]).only(["x"])


def test_null_takes_an_entry_out_of_a_mapping(write):
    recipe = load_recipe(write(PLAIN), ["methods.lora=null"])
    assert list(recipe.methods) == ["baseline", "pre_projection"]
    rates = ["training.learning_rates={skip: 0.1, lora: 0.2}", "training.learning_rates.skip=null"]
    assert load_recipe(write(PLAIN), rates).training.learning_rates == {"lora": 0.2}
    assert "there is no 'lroa' in methods (did you mean 'lora'?)" in refused(write(PLAIN), "methods.lroa=null")
    without = "methods.pre_projection=null", "tuning=null"
    assert "methods.matched.0.match is 'pre_projection', which is not among methods" in refused(write(SIX), *without)


def test_a_label_is_what_reports_call_a_method(write):
    part = load_recipe(write(PLAIN.replace("    - type: lora\n", "    - type: lora\n      label: LoRA (rank 4)\n")))
    plain = load_recipe(write(PLAIN))
    assert part.labels == {"lora": "LoRA (rank 4)"}
    assert part.methods == plain.methods  # so that nothing that a run is made from differs
    assert load_recipe(write(PLAIN), ["labels.baseline=Frozen base"]).labels == {"baseline": "Frozen base"}
    assert load_recipe(write(part.to_yaml())) == part
    assert load_recipe(write(part.to_yaml()), ["methods.lora.0.label=Low rank"]).labels == part.labels
    assert load_recipe(write(part.to_yaml()), ["labels.lora=Low rank"]).labels == {"lora": "Low rank"}
    assert part.only(["pre_projection"]).labels == {}


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("labels.lroa=LoRA", "labels.lroa names no method (did you mean 'lora'?)"),
        ("labels.lora=' '", "labels.lora is ' '; must be a line of 1 to 40 characters"),
        ("labels.lora=pre_projection", "labels.lora is 'pre_projection', which pre_projection is called too"),
        ("labels={lora: A, pre_projection: A}", "is 'A', which lora is called too; give each method its own"),
        ("methods.lora.0.label=3", "labels.lora is 3; must be a string"),
    ],
)
def test_a_label_that_cannot_be_one_is_one_line(write, label, expected):
    assert expected in refused(write(PLAIN), label)
