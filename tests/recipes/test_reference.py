"""The reference of keys and commands and the JSON schemas are current, and say of a recipe what its reading says."""

import json

import jsonschema
import pytest
import recipe_reference
import yaml

from hfpatch.recipes.strict import read_yaml
from hfpatch.support.folders import recipes_dir

SCHEMAS = recipes_dir() / "schema"
RECIPES = sorted(recipes_dir().glob("*.yaml"))


def schema_of(path):
    """Return the schema that the first line of a recipe names for editors."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    return json.loads((path.parent / name).read_text(encoding="utf-8"))


def test_the_generated_files_are_current():
    files = recipe_reference.files()
    assert {file.name for file in SCHEMAS.iterdir()} <= {file.name for file in files}
    stale = [file.name for file, text in files.items() if file.read_text(encoding="utf-8") != text]
    assert stale == [], "run make reference"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_schema_and_fits_it(path):
    jsonschema.validate(read_yaml(path), schema_of(path))


WRONG = {
    "unknown key": "trainning: {}",
    "wrong type": "training: {steps: many}",
    "unknown choice": "data: {layout: pakced}",
    "unknown option of a part": "methods: {baseline: [], a: [{type: pre_projection, expantion: 2}]}",
    "unknown type": "methods: {baseline: [], a: [{type: pre_projektion}]}",
    "a part without a type": "methods: {baseline: [], a: [{match: b}]}",
    "a size to match where there is none": "methods: {baseline: [], a: [{type: query_temperature, match: b}]}",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_schema_refuses_what_reading_refuses(text):
    schema = schema_of(recipes_dir() / "quickstart.yaml")
    recipe = read_yaml(recipes_dir() / "quickstart.yaml")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(recipe | yaml.safe_load(text), schema)


def properties(schema):
    """Yield every key of every section."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items() if "type" in schema else ()
        for inner in schema.values():
            yield from properties(inner)


@pytest.mark.parametrize("kind", recipe_reference.KINDS)
def test_every_key_says_what_it_does(kind):
    keys = dict(properties(json.loads((SCHEMAS / f"{kind}.json").read_text(encoding="utf-8"))))
    assert len(keys) > 50
    assert [key for key, value in keys.items() if not value.get("description")] == []
