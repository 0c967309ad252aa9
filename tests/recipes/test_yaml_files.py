"""Every YAML file that comes with hfpatch is valid, wherever it lies."""

import importlib
import itertools
import runpy
from pathlib import Path

import pytest
import yaml

from hfpatch.evaluation.tasks import LocalData, load_tasks
from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.recipes.pretraining import load_pretraining
from hfpatch.recipes.strict import read_yaml, validate
from hfpatch.support.folders import eval_dir, recipes_dir
from hfpatch.surgery.methods import validate_methods

RECIPES = sorted(recipes_dir().rglob("*.y*ml"))
TASKS = sorted(eval_dir().rglob("*.y*ml"))


class TaskLoader(yaml.SafeLoader):
    """Reads lm-eval's ``!function module.name`` by importing it, from the package or from beside the file."""


def function(loader: TaskLoader, node: yaml.Node) -> object:
    module, _, name = str(node.value).rpartition(".")
    if not module.startswith("hfpatch."):
        beside = eval_dir() / "tinyworld" / f"{module}.py"
        return runpy.run_path(str(beside))[name]
    return getattr(importlib.import_module(module), name)


TaskLoader.add_constructor("!function", function)


def test_there_are_files():
    assert {"quickstart.yaml", "gpt2.yaml", "pythia-160m.yaml"} <= {path.name for path in RECIPES}
    assert {"paper", "tinyworld", "local"} <= {path.parent.name for path in TASKS}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_valid_named_as_its_file_and_so_are_the_commands_in_its_header(path):
    recipe = load_pretraining(path) if "architecture" in read_yaml(path) else load_recipe(path)
    assert recipe.name == path.stem
    # the lines of the header that are set in by three spaces
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    commands = [line[1:].split() for line in lines if line.startswith("#   ")]
    assert commands, "the header holds the exact command"
    if isinstance(recipe, Recipe):
        validate_methods(recipe.methods)
        assert commands[0] == ["hfpatch", "compare", path.stem]
        assert any("=" in word for command in commands for word in command), "the header shows an override"
    for command in commands:
        if command[0] == "hfpatch":
            assert Path(command[2]).stem == path.stem
            load = load_recipe if command[1] in ("compare", "plan") else load_pretraining
            load(path, [word for word in command[3:] if "=" in word])


@pytest.mark.parametrize("path", TASKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_task_file_is_valid(path):
    if path.parent.name == "local":
        assert validate(read_yaml(path), LocalData, str(path)).tasks
        return
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=TaskLoader)
    assert content["task"] == path.stem
    assert content["metadata"]["version"]
    assert content["output_type"] in {"loglikelihood", "loglikelihood_rolling", "multiple_choice", "generate_until"}
    assert all(metric["metric"] for metric in content["metric_list"])


@pytest.mark.parametrize(
    "path", [path for path in TASKS if path.parent.name == "tinyworld"], ids=lambda path: path.name
)
def test_a_tinyworld_task_loads_with_its_documents(path):
    assert len(list(load_tasks([path.stem])[path.stem].eval_docs)) >= 100
